"""Sampling of records, its meaning to an accountant, and the way of the records to the model.

`PrivateSampler` draws what a scheme (`Poisson`, `RandomAllocation`, `UserPoisson`, ...) says and carries its event;
`DPDataLoader` hands the draws out, empty ones included; `BatchMemoryManager` and `PhysicalBatches` cut them into
physical batches that fit in memory; `DeclaredSampling` states what a user samples.
"""

from ghostclip.data.collation import EmptyBatchCollate
from ghostclip.data.loader import DPDataLoader, PoissonSampler, PrivateSampler
from ghostclip.data.physical_batches import BatchMemoryManager, PhysicalBatches
from ghostclip.data.schemes import (
    Cyclic,
    CyclicPoisson,
    DeclaredSampling,
    FullBatch,
    Poisson,
    RandomAllocation,
    SamplingScheme,
    Shuffled,
)
from ghostclip.data.users import UserDataset, UserPoisson

__all__ = [
    "BatchMemoryManager",
    "Cyclic",
    "CyclicPoisson",
    "DPDataLoader",
    "DeclaredSampling",
    "EmptyBatchCollate",
    "FullBatch",
    "PhysicalBatches",
    "Poisson",
    "PoissonSampler",
    "PrivateSampler",
    "RandomAllocation",
    "SamplingScheme",
    "Shuffled",
    "UserDataset",
    "UserPoisson",
]
