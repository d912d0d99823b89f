"""Training on several ranks: one draw of records shared by all, one sum, one draw of noise."""

from ghostclip._refused import refusing
from ghostclip.distributed.agreement import require_agreement, share_noise, share_sampler, world_size
from ghostclip.distributed.parallel import DifferentiallyPrivateDistributedDataParallel
from ghostclip.distributed.release import noisy_shard, noisy_sum_, noisy_sums_
from ghostclip.distributed.shared import SharedNoise, noise_for, share_parameters

__all__ = [
    "DifferentiallyPrivateDistributedDataParallel",
    "SharedNoise",
    "noise_for",
    "noisy_shard",
    "noisy_sum_",
    "noisy_sums_",
    "require_agreement",
    "share_noise",
    "share_parameters",
    "share_sampler",
    "world_size",
]

__getattr__ = refusing(__name__)
