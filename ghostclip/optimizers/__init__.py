"""The one private optimizer: clipped sums in, noise added, accountant told, inner optimizer stepped.

Opacus's other optimizers are names for it, with another clip policy or noise source.
"""

from ghostclip._refused import refusing
from ghostclip.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from ghostclip.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer, SimpleDistributedPerLayerOptimizer
from ghostclip.optimizers.ddpoptimizer import DistributedDPOptimizer
from ghostclip.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from ghostclip.optimizers.dp_optimizer import DPOptimizer
from ghostclip.optimizers.members import MemberOptimizer, release_of
from ghostclip.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from ghostclip.optimizers.perlayeroptimizer import DPPerLayerOptimizer
from ghostclip.optimizers.variants import get_optimizer_class
from ghostclip.optimizers.virtual import BatchToken

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
