"""What frameworks ask of a loader before they prepare it, answered so that draws are not dealt out to ranks once more.

Lightning and Fabric leave loaders alone whose sampler is a `DistributedSampler`, accelerate those that say to be
prepared; both then expect that the loader moves its batches to the device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class DealtOut(DistributedSampler[Any]):
    """Marks that a loader already deals records out to ranks; nobody draws from it."""

    def __init__(self, dataset: Dataset[Any], *, rank: int, replicas: int) -> None:
        super().__init__(dataset, num_replicas=replicas, rank=rank, shuffle=False)


class TakenAsItIs:
    """A loader that frameworks take as it is.

    Attributes:
        device: Where batches are moved; None leaves them where they are.
    """

    device: torch.device | None = None
    _as_it_is = False

    def take_as_it_is(self, *, rank: int, replicas: int) -> None:
        """Let frameworks know, from now on, that nothing is left to do.

        Args:
            rank: This rank's number.
            replicas: Ranks that share each batch.
        """
        self._as_it_is = True
        if replicas > 1 and isinstance(self, DataLoader):
            # Past torch's refusal to exchange a sampler: batches come from the batch sampler.
            vars(self)["sampler"] = DealtOut(self.dataset, rank=rank, replicas=replicas)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether accelerate leaves the loader alone; it asks when it prepares, and then knows its device."""
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        if self._as_it_is and state is not None:
            self.device = state().device
        return self._as_it_is

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Take accelerate's own mark; a loader that it has made anew is another object."""
        self._as_it_is = self._as_it_is or value

    def placed(self, batch: Any) -> Any:
        """Return a batch on the loader's device.

        Args:
            batch: Tensors, in tuples, lists and mappings of any depth.

        Returns:
            The same structure.
        """
        return batch if self.device is None else moved(batch, self.device)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a nested batch on a device."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        made = {key: moved(value, device) for key, value in batch.items()}
        return made if type(batch) is dict else type(batch)(made)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        entries = [moved(entry, device) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    return batch
