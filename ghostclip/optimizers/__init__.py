"""The one private optimizer: clipped sums in, noise added, accountant told, inner optimizer stepped."""

from ghostclip.optimizers.dp_optimizer import DPOptimizer
from ghostclip.optimizers.virtual import BatchToken

__all__ = ["BatchToken", "DPOptimizer"]
