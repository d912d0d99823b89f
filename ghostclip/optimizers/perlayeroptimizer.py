"""Per-layer clipping under Opacus's import path."""

from ghostclip.optimizers.variants import DPPerLayerOptimizer

__all__ = ["DPPerLayerOptimizer"]
