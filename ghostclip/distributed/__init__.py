"""Training on several ranks: one draw of records shared by all, one sum, one draw of noise."""

from ghostclip.distributed.agreement import (
    Share,
    from_first,
    gathered,
    is_first,
    refused_together,
    require_agreement,
    require_one_draw,
    share_noise,
    telling,
    world_size,
)
from ghostclip.distributed.pipeline import PipelineClipper
from ghostclip.distributed.pipelined import Pipeline
from ghostclip.distributed.placement import Box, MeshAxis, Placement, placement_of
from ghostclip.distributed.release import SharedNoise, noise_for, noisy_parts_, noisy_shard, noisy_sum_, noisy_sums_
from ghostclip.distributed.sample_ranks import Shares, SplitSequences, all_apart, require_all_ranks
from ghostclip.distributed.sharded import ShardedModel, sharded_model
from ghostclip.distributed.weights import (
    DifferentiallyPrivateDistributedDataParallel,
    broadcast_parameters,
    copy_inside,
    refuse_sharded,
    require_equal_weights,
)

__all__ = [
    "Box",
    "DifferentiallyPrivateDistributedDataParallel",
    "MeshAxis",
    "Pipeline",
    "PipelineClipper",
    "Placement",
    "Share",
    "ShardedModel",
    "Shares",
    "SharedNoise",
    "SplitSequences",
    "all_apart",
    "broadcast_parameters",
    "copy_inside",
    "from_first",
    "gathered",
    "is_first",
    "noise_for",
    "noisy_parts_",
    "noisy_shard",
    "noisy_sum_",
    "noisy_sums_",
    "placement_of",
    "refuse_sharded",
    "refused_together",
    "require_agreement",
    "require_all_ranks",
    "require_equal_weights",
    "require_one_draw",
    "share_noise",
    "sharded_model",
    "telling",
    "world_size",
]
