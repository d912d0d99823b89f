"""Training on several ranks: one draw of records shared by all, one sum, one draw of noise."""

from ghostclip.distributed.agreement import require_agreement, share_noise, share_sampler, world_size
from ghostclip.distributed.release import noisy_shard, noisy_sum_

__all__ = ["noisy_shard", "noisy_sum_", "require_agreement", "share_noise", "share_sampler", "world_size"]
