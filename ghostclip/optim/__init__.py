"""The one private optimizer: clipped sums in, noise added, accountant told, inner optimizer stepped."""

from ghostclip.optim.dp_optimizer import DPOptimizer
from ghostclip.optim.draws import BatchToken
from ghostclip.optim.members import MemberOptimizer, private_optimizer, release_of

__all__ = ["BatchToken", "DPOptimizer", "MemberOptimizer", "private_optimizer", "release_of"]
