"""`BatchMemoryManager`: large logical batches on a device that holds only part of one at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ghostclip import _validate
from ghostclip.data.physical_batch_size import find_max_physical_batch_size
from ghostclip.data.physical_loader import PhysicalBatchLoader
from ghostclip.data.size_policies import FixedSize, SizePolicy, largest_batch, learned_size
from ghostclip.errors import InvalidOptionError
from ghostclip.optim import DPOptimizer, release_of


class BatchMemoryManager:
    """Splits logical batches into physical ones that fit in memory, without changing what is released.

    Inside the `with` block the loader hands out physical batches. `optimizer.step()` after each of them only
    accumulates until the logical batch is complete; then it draws noise once, counts one step and updates.

    Privacy:
        The released values have the same distribution as without it. A logical batch that is left half-way is never
        released.

    With `max_physical_batch_size="auto"`:

    - given `trial_step`, sizes are tried before the loop (`find_max_physical_batch_size`); its gradients are dropped;
    - without it, the first real physical batches are measured: they start at one sample and grow while the budget
      allows, so nothing is computed twice. On CUDA that never provokes an out-of-memory error to recover from, so the
      budget is a share of the free memory there too.

    A batch that runs out of memory all the same is tried again in parts if the loop lets the loader run it::

        with BatchMemoryManager(...) as loader:
            for batch in loader:
                loader.run(batch, lambda part: criterion(model(part[0]), part[1]).backward())
                optimizer.step()
                optimizer.zero_grad()

    Args:
        data_loader: The loader of logical batches, as `PrivacyEngine.make_private` returns it.
        max_physical_batch_size: The largest physical batch, or "auto".
        optimizer: The private optimizer.
        trial_step: Runs forward and backward on that many samples of the largest shape to come; only for "auto".
        memory_budget: Bytes that "auto" may fill on top of what is in use; None for half of what is available (with
            `trial_step` on CUDA: all of the device).

    Raises:
        InvalidOptionError: If an option is out of range, or given without "auto".
        DataError: If the loader's batches cannot be split.

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> with ghostclip.BatchMemoryManager(
        ...     data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        ... ) as parts:
        ...     for x, y in parts:  # 4 records at most; the optimizer steps after the last part of a batch
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
    """

    @_validate.suggests_options
    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int | str,
        optimizer: DPOptimizer,
        trial_step: Callable[[int], object] | None = None,
        memory_budget: int | None = None,
    ) -> None:
        optimizer = release_of(optimizer)
        if not isinstance(optimizer, DPOptimizer):
            raise InvalidOptionError(
                f"optimizer: expected the one that make_private() returned, got {type(optimizer).__name__}."
            )
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.max_physical_batch_size = max_physical_batch_size
        if max_physical_batch_size != "auto":
            self.max_physical_batch_size = _validate.positive_int(max_physical_batch_size, "max_physical_batch_size")
            if trial_step is not None or memory_budget is not None:
                raise InvalidOptionError(
                    "trial_step and memory_budget only say how to find max_physical_batch_size='auto'."
                )
        elif optimizer.clipper.is_sharded:
            raise InvalidOptionError(
                "max_physical_batch_size='auto' with a model that several ranks hold in parts: each would find its own "
                "size, and they must run the model equally often. Give a number, the same on every rank."
            )
        self._trial_step = trial_step
        self._memory_budget = memory_budget
        self._policy: SizePolicy | None = None

    @property
    def physical_batch_size(self) -> int:
        """The largest physical batch that is handed out at present.

        Raises:
            InvalidOptionError: Before the `with` block is entered, for "auto".
        """
        if self._policy is not None:
            return self._policy.size
        if isinstance(self.max_physical_batch_size, int):
            return self.max_physical_batch_size
        raise InvalidOptionError("max_physical_batch_size='auto' is found when the `with` block is entered.")

    def __enter__(self) -> PhysicalBatchLoader:
        if self._policy is None:
            self._policy = self._make_policy()
        return PhysicalBatchLoader(
            self.data_loader,
            optimizer=self.optimizer,
            policy=self._policy,
            expected_batch_size=self._expected_batch_size(),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.optimizer.discard_pending()

    def _expected_batch_size(self) -> float:
        """Return the expected size of a logical batch."""
        expected = self.optimizer.expected_batch_size
        return float(len(self.data_loader.dataset)) if expected is None else expected  # type: ignore[arg-type]

    def _make_policy(self) -> SizePolicy:
        """Fix the size, find it, or start to learn it."""
        if isinstance(self.max_physical_batch_size, int):
            return FixedSize(self.max_physical_batch_size)
        device = self.optimizer.params[0].device
        upper = largest_batch(self._expected_batch_size())
        if self._trial_step is not None:
            return FixedSize(self._rehearse(self._trial_step, upper, device))
        return learned_size(upper=upper, memory_budget=self._memory_budget, device=device)

    def _rehearse(self, trial_step: Callable[[int], object], upper: int, device: torch.device) -> int:
        """Find the size with the user's trial step, which runs forward and backward on a number of samples."""
        # The inner optimizer makes its state in the first real step (Adam: two tensors a parameter); keep room for it.
        missing = 0 if self.optimizer.state else 2
        room = [torch.ones_like(p) for p in self.optimizer.params if p.requires_grad for _ in range(missing)]

        def step(size: int) -> None:
            # As `run` does: sums that exist are copied before something is added to them.
            with self.optimizer.clipper.savepoint():
                trial_step(size)

        with self.optimizer.rehearsal():
            size = find_max_physical_batch_size(step, upper=upper, memory_budget=self._memory_budget, device=device)
        del room
        return size
