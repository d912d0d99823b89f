"""The engine under Opacus's import path."""

from ghostclip.accounting import create_accountant
from ghostclip.engine import PrivacyEngine
from ghostclip.optim import DPOptimizer

__all__ = [
    "DPOptimizer",
    "PrivacyEngine",
    "create_accountant",
]
