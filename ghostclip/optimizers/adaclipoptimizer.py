"""Adaptive clipping under Opacus's import path."""

from ghostclip.optimizers.variants import AdaClipDPOptimizer

__all__ = ["AdaClipDPOptimizer"]
