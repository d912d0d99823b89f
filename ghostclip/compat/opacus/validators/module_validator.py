"""`ModuleValidator` under Opacus's import path."""

from ghostclip.errors import UnsupportedModuleError
from ghostclip.validation.fixers.module_validator import ModuleValidator

__all__ = [
    "ModuleValidator",
    "UnsupportedModuleError",
]
