"""The facades under Opacus's import path."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.facade.module import GradSampleHooks, GradSampleModule

__all__ = ["GradSampleHooks", "GradSampleModule"]

__getattr__ = refusing(__name__)
