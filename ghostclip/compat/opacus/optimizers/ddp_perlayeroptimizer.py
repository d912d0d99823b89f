"""Per-layer clipping on several ranks under Opacus's import path; the bounds say which it is."""

from ghostclip.compat.opacus.optimizers.variants import DistributedDPOptimizer as DistributedPerLayerOptimizer
from ghostclip.compat.opacus.optimizers.variants import DistributedDPOptimizer as SimpleDistributedPerLayerOptimizer

__all__ = ["DistributedPerLayerOptimizer", "SimpleDistributedPerLayerOptimizer"]
