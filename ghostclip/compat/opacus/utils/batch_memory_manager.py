"""Physical batches under Opacus's import path."""

from ghostclip.data.batch_memory_manager import BatchMemoryManager, wrap_data_loader
from ghostclip.data.batch_splitting_sampler import BatchSplittingSampler
from ghostclip.optim import DPOptimizer

__all__ = ["BatchMemoryManager", "BatchSplittingSampler", "DPOptimizer", "wrap_data_loader"]
