"""Training on several ranks: one draw of records shared by all, one sum, one draw of noise."""

from ghostclip.distributed.pipeline import Pipeline, PipelineClipper
from ghostclip.distributed.release import SharedNoise
from ghostclip.distributed.sample_ranks import SplitSequences
from ghostclip.distributed.sharded import ShardedModel
from ghostclip.distributed.weights import DifferentiallyPrivateDistributedDataParallel, broadcast_parameters

__all__ = [
    "DifferentiallyPrivateDistributedDataParallel",
    "Pipeline",
    "PipelineClipper",
    "ShardedModel",
    "SharedNoise",
    "SplitSequences",
    "broadcast_parameters",
]
