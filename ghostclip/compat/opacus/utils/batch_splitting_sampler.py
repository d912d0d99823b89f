"""A batch sampler that splits logical batches for a loader that the user makes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from ghostclip._validate import positive_int
from ghostclip.data.physical_loader import SplittingSampler
from ghostclip.data.sampler import PrivateSampler
from ghostclip.data.size_policies import FixedSize
from ghostclip.errors import InvalidOptionError, MissingGradientError
from ghostclip.optim import BatchToken, DPOptimizer, release_of


class BatchSplittingSampler(Sampler[list[int]]):
    """Yields parts of logical batches and tells the optimizer which of them complete one.

        loader = DataLoader(dataset, batch_sampler=BatchSplittingSampler(
            sampler=private_loader.batch_sampler, max_batch_size=64, optimizer=optimizer),
            collate_fn=private_loader.collate_fn)

    `BatchMemoryManager` does this with any number of workers. Here the optimizer is told when a part is asked for, so
    parts must be asked for one at a time: `num_workers=0`.

    Privacy:
        As for `BatchMemoryManager`. A part that is asked for before the step on the one before could be taken for part
        of a wrong logical batch, so that is an error.

    Args:
        sampler: Yields the indices of logical batches, as a private loader's `batch_sampler` does.
        max_batch_size: The largest part.
        optimizer: The private optimizer.

    Raises:
        InvalidOptionError: If an option is out of range, or the optimizer is not private.
    """

    def __init__(self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer) -> None:
        optimizer = release_of(optimizer)
        if not isinstance(optimizer, DPOptimizer):
            raise InvalidOptionError(
                f"optimizer: expected the one that make_private() returned, got {type(optimizer).__name__}."
            )
        self.sampler = sampler
        self.max_batch_size = positive_int(max_batch_size, "max_batch_size")
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the parts of all logical batches.

        Yields:
            Indices; none for a logical batch without records.

        Raises:
            MissingGradientError: If a part is asked for before a step was made on the one before.
        """
        optimizer = self.optimizer
        optimizer.discard_pending()
        token: BatchToken | None = None
        before: tuple[int, int] | None = None
        try:
            for token, indices in self._parts():
                if before == self._progress():
                    raise MissingGradientError(
                        "BatchSplittingSampler: a batch was asked for before optimizer.step() was called on the last "
                        "one. Step on every batch, also on an empty one, and make the loader with num_workers=0; "
                        "BatchMemoryManager works with any number."
                    )
                optimizer.begin_physical_batch(token)
                before = self._progress()
                yield indices
            optimizer.require_released()
        finally:
            # By identity: a loop that is finalised late must not drop what a newer one has accumulated.
            if token is not None:
                optimizer.discard_pending(token=token)

    def __len__(self) -> int:
        """Return about how many parts a pass has; sampled batches differ in size."""
        logical: Any = self.sampler
        size = logical.batch_size if isinstance(logical, BatchSampler) else getattr(logical, "expected_batch_size", 0)
        return math.ceil(len(logical) * max(1.0, size / self.max_batch_size))

    def _progress(self) -> tuple[int, int]:
        """Numbers that every step changes: of the times sums were dropped, and of the backwards in them."""
        return self.optimizer.clipper.generation, self.optimizer.clipper.backward_passes

    def _parts(self) -> Iterator[tuple[BatchToken, list[int]]]:
        """Split; a private sampler is told what was handed out, so that a checkpoint knows where to resume."""
        parts = SplittingSampler(self.sampler, FixedSize(self.max_batch_size))
        if not isinstance(self.sampler, PrivateSampler):
            yield from parts
            return
        with self.sampler.tracking():
            for chunk in parts:
                if chunk.token.chunk == 0:
                    self.sampler.mark_delivered()
                yield chunk
