"""For type checkers: modules that the import finder makes, and their names, are taken for Any."""

from typing import Any

from ghostclip import PrivacyEngine as PrivacyEngine
from ghostclip import __version__ as __version__
from ghostclip.compat.opacus.training import (
    GradSampleModuleFastGradientClipping as GradSampleModuleFastGradientClipping,
)
from ghostclip.facade import GradSampleModule as GradSampleModule

def __getattr__(name: str) -> Any: ...
