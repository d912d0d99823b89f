"""Training on several ranks: one draw of records shared by all, one sum, one draw of noise."""

from ghostclip.distributed.agreement import (
    from_first,
    gathered,
    is_first,
    refused_together,
    require_agreement,
    telling,
    world_size,
)
from ghostclip.distributed.pipeline import PipelineClipper
from ghostclip.distributed.pipelined import Pipeline
from ghostclip.distributed.release import SharedNoise, noise_for
from ghostclip.distributed.sample_ranks import Shares, SplitSequences, all_apart, require_all_ranks
from ghostclip.distributed.sharded import ShardedModel, sharded_model
from ghostclip.distributed.weights import (
    DifferentiallyPrivateDistributedDataParallel,
    broadcast_parameters,
    copy_inside,
    refuse_sharded,
)

__all__ = [
    "DifferentiallyPrivateDistributedDataParallel",
    "Pipeline",
    "PipelineClipper",
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
    "refuse_sharded",
    "refused_together",
    "require_agreement",
    "require_all_ranks",
    "sharded_model",
    "telling",
    "world_size",
]
