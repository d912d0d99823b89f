"""Registering validators and fixers under Opacus's import path."""

from ghostclip.validation.fixers.module_validator import ModuleValidator
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator

__all__ = [
    "ModuleValidator",
    "register_module_fixer",
    "register_module_validator",
]
