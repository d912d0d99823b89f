"""`PhysicalBatches`: a whole logical batch run in parts that fit in memory, for loops that are written by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ghostclip import _validate
from ghostclip._memory import is_out_of_memory
from ghostclip.data.out_of_memory import count_rows, run_in_parts
from ghostclip.data.size_policies import FixedSize, SizePolicy, largest_batch, learned_size
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.optim import DPOptimizer, release_of


class PhysicalBatches:
    """Runs forward and backward of each logical batch in parts that fit in memory; one step releases them together.

    Where `BatchMemoryManager` hands a loop physical batches, this takes the loop's logical ones apart, so that a
    framework's steps, epochs, schedulers and logs count what they always counted: releases. Only the batch of data has
    to fit in memory as a whole.

    With `max_physical_batch_size="auto"` the first parts are measured: they start at one sample and grow while memory
    allows. Where memory runs out, given a size or not, the batch is run again in parts of half the size, and later
    batches begin with those.

    Privacy:
        The released values have the same distribution as without it. Whatever fails on the way, every record of the
        draw is in the sum once, and noise and account know of one step. How many parts there are follows from the
        size of the draw, which is not public.

    Args:
        optimizer: The private optimizer.
        max_physical_batch_size: The largest part, or "auto".
        memory_budget: Bytes that "auto" may fill on top of what is in use; None for half of what is available.

    Raises:
        InvalidOptionError: If an option is out of range, or given without "auto".

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> parts = ghostclip.PhysicalBatches(optimizer)
        >>> for batch in loader:
        ...     _ = parts.run(batch, lambda part: criterion(model(part[0]), part[1]).backward())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        *,
        max_physical_batch_size: int | str = "auto",
        memory_budget: int | None = None,
    ) -> None:
        self._optimizer = release_of(optimizer)
        if not isinstance(self._optimizer, DPOptimizer):
            raise InvalidOptionError(
                f"optimizer: expected the one that make_private() returned, got {type(optimizer).__name__}."
            )
        self._memory_budget = memory_budget
        self._policy: SizePolicy | None = None
        if max_physical_batch_size != "auto":
            if memory_budget is not None:
                raise InvalidOptionError("memory_budget only says how to find max_physical_batch_size='auto'.")
            self._policy = FixedSize(_validate.positive_int(max_physical_batch_size, "max_physical_batch_size"))

    @property
    def size(self) -> int:
        """The largest part at present; it grows and shrinks with what memory turns out to hold."""
        return self._sizes().size

    def run(self, batch: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Run forward and backward on a logical batch, or on what a loop makes its step of.

        Args:
            batch: Tensors, in tuples, lists and mappings of any depth; its first tensor tells the number of samples.
            work: Runs forward and backward on some of its samples, with a loss that is reduced over them as it was
                declared to `make_private`. It is called again for samples whose part did not fit in memory.

        Returns:
            What `work` returned, part by part, each sample in one part.

        Raises:
            DataError: If the batch has to be split and cannot be.
            torch.OutOfMemoryError: If not even one sample fits.
        """
        rows = count_rows(batch, axis=self._optimizer.clipper.axis)
        try:
            return run_in_parts(self._optimizer, batch, 1 if rows is None else rows, work, self._sizes())
        except BaseException as error:
            if rows is None and is_out_of_memory(error):
                raise DataError(
                    f"a batch ({type(batch).__name__}) did not fit in memory and cannot be split: it holds no tensors "
                    "in tuples, lists or mappings. Let BatchMemoryManager split it where records are sampled."
                ) from error
            raise

    def _sizes(self) -> SizePolicy:
        """Return the policy; learning begins at the first batch, when the model is on its device."""
        if self._policy is None:
            device = self._optimizer.params[0].device
            upper = largest_batch(self._optimizer.expected_batch_size or 1e6)
            self._policy = learned_size(upper=upper, memory_budget=self._memory_budget, device=device)
        return self._policy
