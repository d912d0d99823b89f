"""The private optimizer under the name of Opacus's two-pass one: it takes the sums of any strategy."""

from ghostclip.optim.dp_optimizer import DPOptimizer as DPOptimizerFastGradientClipping

__all__ = ["DPOptimizerFastGradientClipping"]
