"""The private optimizer under Opacus's import path."""

from ghostclip.optim.dp_optimizer import DPOptimizer

__all__ = ["DPOptimizer"]
