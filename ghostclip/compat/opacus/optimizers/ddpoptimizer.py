"""Training on several ranks under Opacus's import path."""

from ghostclip.compat.opacus.optimizers.variants import DistributedDPOptimizer

__all__ = ["DistributedDPOptimizer"]
