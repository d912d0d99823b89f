"""Modules that cannot be trained privately as they are, and their replacements.

Recurrent layers and attention need no replacement: they are captured as they are.
"""

from ghostclip.validation.fixers import batch_norm, embedding, instance_norm
from ghostclip.validation.fixers.module_validator import ModuleValidator
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator

__all__ = [
    "ModuleValidator",
    "batch_norm",
    "embedding",
    "instance_norm",
    "register_module_fixer",
    "register_module_validator",
]
