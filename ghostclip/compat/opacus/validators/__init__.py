"""Which modules cannot be trained privately as they are, and what replaces them; names as in Opacus 1.6.

Recurrent layers and attention need no replacement here: they are captured as they are.
"""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.compat.opacus.validators import batch_norm, instance_norm
from ghostclip.compat.opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedError,
    UnsupportedModuleError,
)
from ghostclip.compat.opacus.validators.module_validator import ModuleValidator
from ghostclip.compat.opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = [
    "ModuleValidator",
    "register_module_validator",
    "register_module_fixer",
    "UnsupportedError",
    "UnsupportedModuleError",
    "UnsupportableModuleError",
    "NotYetSupportedModuleError",
    "ShouldReplaceModuleError",
    "IllegalModuleConfigurationError",
    "batch_norm",
    "instance_norm",
]

__getattr__ = refusing(__name__)
