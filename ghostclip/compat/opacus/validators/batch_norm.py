"""Batch norm under Opacus's import path."""

from ghostclip.errors import ShouldReplaceModuleError, UnsupportableModuleError, UnsupportedModuleError
from ghostclip.validation.fixers.batch_norm import fix, validate
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator

__all__ = [
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedModuleError",
    "fix",
    "register_module_fixer",
    "register_module_validator",
    "validate",
]
