"""A data loader whose batches are Poisson samples, empty ones included."""

from ghostclip.data_loader.empty_batch import EmptyBatchCollate
from ghostclip.data_loader.loader import DPDataLoader

__all__ = ["DPDataLoader", "EmptyBatchCollate"]
