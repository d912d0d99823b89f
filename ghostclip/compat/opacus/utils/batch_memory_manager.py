"""Physical batches under Opacus's import path."""

from typing import Any

from torch.utils.data import DataLoader

from ghostclip.compat.opacus.utils.batch_splitting_sampler import BatchSplittingSampler
from ghostclip.data.batch_memory_manager import BatchMemoryManager
from ghostclip.data.physical_loader import PhysicalBatchLoader
from ghostclip.optim import DPOptimizer

__all__ = ["BatchMemoryManager", "BatchSplittingSampler", "DPOptimizer", "wrap_data_loader"]


def wrap_data_loader(
    *, data_loader: DataLoader[Any], max_batch_size: int | str, optimizer: DPOptimizer
) -> PhysicalBatchLoader:
    """Return the loader of physical batches that a `BatchMemoryManager` hands out.

    A loop over it that is left early is cleaned up at the next one only; `with BatchMemoryManager(...)` does at once.

    Args:
        data_loader: The loader of logical batches.
        max_batch_size: The largest physical batch, or "auto".
        optimizer: The private optimizer.

    Returns:
        The loader.
    """
    manager = BatchMemoryManager(data_loader=data_loader, max_physical_batch_size=max_batch_size, optimizer=optimizer)
    return manager.__enter__()
