"""The one private optimizer: clipped sums in, noise added, accountant told, inner optimizer stepped."""

from ghostclip.optim.dp_optimizer import DPOptimizer, MemberOptimizer, private_optimizer, release_of
from ghostclip.optim.draws import BatchToken

__all__ = ["BatchToken", "DPOptimizer", "MemberOptimizer", "private_optimizer", "release_of"]
