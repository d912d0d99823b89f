"""What an attached engine does in the place of an optimizer's own methods."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ghostclip import _torch
from ghostclip.optim import DPOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

_REPLACED = ("step", "zero_grad", "virtual_step", "privacy_engine")
_ABSENT = object()


class Attachment:
    """The methods that replace an optimizer's own, and the private optimizer that they ask.

    Args:
        engine: Becomes the optimizer's `privacy_engine`.
        private: Wraps the optimizer.
        noise_multiplier: Returns σ of the next step.
        size_known: Whether the expected size of a batch is known; else it is taken from the first logical batch.
    """

    def __init__(
        self, engine: object, private: DPOptimizer, *, noise_multiplier: Callable[[], float], size_known: bool
    ) -> None:
        self.engine = engine
        self.private = private
        self._noise_multiplier = noise_multiplier
        self._optimizer = private.original_optimizer
        self._before = {name: self._optimizer.__dict__.get(name, _ABSENT) for name in _REPLACED}
        self._own_step = self._optimizer.step
        self._own_zero_grad = self._optimizer.zero_grad
        self._size_known = size_known
        self._samples = 0
        self._inside = False

    def install(self) -> None:
        """Put the methods on the optimizer, as plain functions: torch's learning-rate schedulers wrap `step` again."""

        def step(_: Optimizer, closure: Callable[[], Any] | None = None, is_empty: bool = False) -> Any:  # noqa: FBT001, FBT002
            return self.step(closure, is_empty=is_empty)

        def zero_grad(_: Optimizer, set_to_none: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's signature
            self.zero_grad(set_to_none=set_to_none)

        def virtual_step(_: Optimizer) -> None:
            self.virtual_step()

        if _torch.is_counted(self._own_step):
            # A scheduler that was made before counts the steps of the wrapped method, which is called all the same.
            _torch.mark_counted(step)
        for function in (step, zero_grad, virtual_step):
            setattr(self._optimizer, function.__name__, types.MethodType(function, self._optimizer))
        self._optimizer.privacy_engine = self.engine  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None, *, is_empty: bool = False) -> Any:
        """Release the logical batch and update the parameters.

        Args:
            closure: Evaluates the model once, calls backward and returns the loss.
            is_empty: Whether the batch had no records, so that no backward was made.

        Returns:
            What the closure returned, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_empty and not self.private.clipper.has_clipped_sum:
            self.private.clipper.mark_empty_batch()
        self._samples += self.private.clipper.batch_size if self.private.clipper.has_clipped_sum else 0
        if not self._size_known and self._samples:
            self.private.expected_batch_size = float(self._samples)
            self._size_known = True
        self._samples = 0
        self.private.noise_multiplier = self._noise_multiplier()
        if self._guarded(self.private.pre_step):
            self._own_step()
        return loss

    def zero_grad(self, *, set_to_none: bool = False) -> None:
        """Forget the sums, unless a logical batch is half accumulated.

        Args:
            set_to_none: As torch takes it.
        """
        if self._inside:
            self._own_zero_grad(set_to_none)
        else:
            self._guarded(self.private.zero_grad)

    def virtual_step(self) -> None:
        """Keep the clipped sum of a physical batch."""
        self._samples += self.private.clipper.batch_size
        self.private.signal_skip_step(do_skip=True)
        self._guarded(self.private.pre_step)

    def close(self) -> None:
        """Give the optimizer its own methods back."""
        for name, before in self._before.items():
            if before is _ABSENT:
                self._optimizer.__dict__.pop(name, None)
            else:
                setattr(self._optimizer, name, before)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Run what calls the optimizer's own zero_grad, which is this object's."""
        self._inside = True
        try:
            return work()
        finally:
            self._inside = False
