"""Adaptive clipping under Opacus's import path."""

from ghostclip.compat.opacus.optimizers.variants import AdaClipDPOptimizer

__all__ = ["AdaClipDPOptimizer"]
