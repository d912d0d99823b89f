"""Instance norm under Opacus's import path."""

from ghostclip.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from ghostclip.validation.fixers.instance_norm import fix, validate
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator

__all__ = [
    "IllegalModuleConfigurationError",
    "UnsupportedModuleError",
    "fix",
    "register_module_fixer",
    "register_module_validator",
    "validate",
]
