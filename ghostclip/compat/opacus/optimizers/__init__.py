"""The one private optimizer: clipped sums in, noise added, accountant told, inner optimizer stepped.

Opacus's other optimizers are names for it, with another clip policy or noise source.
"""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.compat.opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from ghostclip.compat.opacus.optimizers.ddp_perlayeroptimizer import (
    DistributedPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
)
from ghostclip.compat.opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from ghostclip.compat.opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)
from ghostclip.compat.opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from ghostclip.compat.opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer
from ghostclip.compat.opacus.optimizers.variants import get_optimizer_class
from ghostclip.optim import BatchToken, DPOptimizer, MemberOptimizer, release_of

__all__ = [
    "AdaClipDPOptimizer",
    "BatchToken",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "DistributedPerLayerOptimizer",
    "MemberOptimizer",
    "SimpleDistributedPerLayerOptimizer",
    "get_optimizer_class",
    "release_of",
]

__getattr__ = refusing(__name__)
