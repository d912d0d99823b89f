"""A data loader whose batches are Poisson samples, empty ones included."""

from ghostclip.data_loader.empty_batch import EmptyBatchCollate
from ghostclip.data_loader.loader import DPDataLoader
from ghostclip.data_loader.opacus_names import (
    CollateFnWithEmpty,
    DistributedUniformWithReplacementSampler,
    dtype_safe,
    shape_safe,
    switch_generator,
    wrap_collate_with_empty,
)
from ghostclip.sampling import UniformWithReplacementSampler

__all__ = [
    "CollateFnWithEmpty",
    "DPDataLoader",
    "DistributedUniformWithReplacementSampler",
    "EmptyBatchCollate",
    "UniformWithReplacementSampler",
    "dtype_safe",
    "shape_safe",
    "switch_generator",
    "wrap_collate_with_empty",
]
