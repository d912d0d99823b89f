"""Per-layer clipping under Opacus's import path."""

from ghostclip.compat.opacus.optimizers.variants import DPPerLayerOptimizer

__all__ = ["DPPerLayerOptimizer"]
