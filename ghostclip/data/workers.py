"""Options by which a loader fetches its records, for another loader that takes its place."""

from typing import Any

from torch.utils.data import DataLoader


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's options for `DataLoader` on how records are fetched: workers, pinning, time limit."""
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
