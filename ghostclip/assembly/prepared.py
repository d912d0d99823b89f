"""Optimizers and loaders that accelerate or Fabric have prepared: what is inside is made private, in the same wrapping.

Found by the classes' names, since neither library is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ghostclip.data.torch_loader import TakenAsItIs, worker_options

_SHARDED = ("DataLoaderShard", "DataLoaderDispatcher")


@dataclass(frozen=True)
class Prepared:
    """The user's objects without a framework's wrappings."""

    optimizer: Any
    data_loader: Any  # its batch size is that of all ranks
    given_optimizer: Any
    given_loader: Any

    @classmethod
    def of(cls, optimizer: Any, data_loader: Any) -> Prepared:
        """Take the framework's wrappings off."""
        several = isinstance(optimizer, Sequence)
        bare = [_bare_optimizer(one) for one in optimizer] if several else _bare_optimizer(optimizer)
        return cls(bare, _bare_loader(data_loader), optimizer, data_loader)

    def around(self, private: Any) -> Any:
        """Put the wrappings on what `make_private` returns."""
        module, optimizer, *criterion, loader = private
        if isinstance(self.given_optimizer, Sequence):
            optimizer = [_wrapped(*pair) for pair in zip(self.given_optimizer, optimizer, strict=True)]
        else:
            optimizer = _wrapped(self.given_optimizer, optimizer)
        if _is(self.given_loader, "lightning", "_FabricDataLoader"):
            loader = type(self.given_loader)(loader, device=self.given_loader.device)
        elif _is(self.given_loader, "accelerate", *_SHARDED) and isinstance(loader, TakenAsItIs):
            dispatched = _is(self.given_loader, "accelerate", "DataLoaderDispatcher")
            loader.device = self.given_loader.state.device if dispatched else self.given_loader.device
        return (module, optimizer, *criterion, loader)


def _is(thing: Any, library: str, *names: str) -> bool:
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0].endswith(library) for kind in type(thing).__mro__
    )


def _bare_optimizer(optimizer: Any) -> Any:
    wrapped = _is(optimizer, "accelerate", "AcceleratedOptimizer") or _is(optimizer, "lightning", "_FabricOptimizer")
    return optimizer.optimizer if wrapped else optimizer


def _wrapped(original: Any, private: Optimizer) -> Any:
    """Return the private optimizer in the wrapping of the given one, which the framework refers to."""
    if _is(original, "accelerate", "AcceleratedOptimizer"):
        original.__init__(private, device_placement=False, scaler=original.scaler)
        return original
    kind = next((kind for kind in type(original).__mro__ if kind.__name__ == "_FabricOptimizer"), None)
    if kind is not None:
        kind.__init__(original, private, original._strategy, original._callbacks)  # type: ignore[misc]
        return original
    return private


def _bare_loader(loader: Any) -> Any:
    if _is(loader, "lightning", "_FabricDataLoader"):
        return loader._dataloader
    if not _is(loader, "accelerate", *_SHARDED):
        return loader
    base = loader.base_dataloader
    batches = base.batch_sampler
    if type(batches).__name__ == "BatchSamplerShard":
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler or isinstance(base.dataset, IterableDataset):
        # Left for the checks that every loader goes through.
        return base
    sampler: Any = batches.sampler
    if type(sampler).__name__ == "SeedableRandomSampler" and not sampler.replacement:
        sampler = RandomSampler(base.dataset, num_samples=sampler._num_samples)
    return DataLoader(
        base.dataset,
        batch_size=batches.batch_size,
        sampler=sampler,
        collate_fn=base.collate_fn,
        generator=base.generator,
        **worker_options(base),
    )
