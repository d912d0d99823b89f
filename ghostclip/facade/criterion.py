"""A criterion whose `loss.backward()` runs the two passes of the "ghost" and "fast" strategies.

Shape legend: B samples, `...` positions of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ghostclip.errors import LossReductionError

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper


class Defers(Protocol):
    """Computes losses and their backward as one graph."""

    def loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PrivateLoss | None:
        """Record a call of the criterion and return a deferred loss; None where it is computed at once."""

    def resolved(self, tree: Any) -> Any:
        """Return arguments with deferred outputs replaced by their values."""


class PrivateLoss:
    """Per-sample losses of one batch until `backward()` has clipped them; sums and multiples of losses are allowed.

    Privacy:
        `item()` and `detach()` show the exact loss, which is not a private quantity.
    """

    # Numbers may be added and multiplied, losses of the same batch added and subtracted.
    def __init__(self, clipper: GhostClipper, per_sample: torch.Tensor) -> None:
        self._clipper = clipper
        self.per_sample = per_sample

    def backward(self) -> None:
        """Clip every sample's gradient and add their sum to `p.grad`."""
        self._clipper.backward(self.per_sample)

    def detach(self) -> torch.Tensor:
        """Return the reduced loss as a scalar tensor without a graph."""
        loss_B = self.per_sample.detach()
        return loss_B.mean() if self._clipper.loss_reduction == "mean" else loss_B.sum()

    def item(self) -> float:
        """Return the reduced loss as a number."""
        return self.detach().item()

    def _with(self, per_sample: torch.Tensor) -> PrivateLoss:
        """Return a loss of the same batch."""
        return PrivateLoss(self._clipper, per_sample)

    def __float__(self) -> float:
        return self.item()

    def __mul__(self, other: object) -> PrivateLoss:
        return self._with(self.per_sample * number_of(other))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> PrivateLoss:
        return self._with(self.per_sample / number_of(other))

    def __add__(self, other: object) -> PrivateLoss:
        if isinstance(other, PrivateLoss) and other.per_sample.shape == self.per_sample.shape:
            return self._with(self.per_sample + other.per_sample)
        return self._with(self.per_sample + number_of(other))

    __radd__ = __add__

    def __neg__(self) -> PrivateLoss:
        return self._with(-self.per_sample)

    def __sub__(self, other: object) -> PrivateLoss:
        return self + -(other if isinstance(other, PrivateLoss) else number_of(other))

    def __rsub__(self, other: object) -> PrivateLoss:
        return -self + other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.item():.4f}, samples={self.per_sample.shape[0]})"


def number_of(other: object) -> float:
    """Return a number that a loss may be added to or multiplied with; refuse any other operand."""
    if isinstance(other, (int, float)):
        return other
    raise LossReductionError(
        f"the loss of a private criterion was combined with a {type(other).__name__}. It holds one loss for each "
        "sample, and takes numbers and losses of the same criterion and batch. Compute further terms in the criterion, "
        "for each sample: make_private(criterion=...) takes any function that returns losses of shape (B,)."
    )


class PrivateCriterion:
    """Calls the user's criterion per sample."""

    # A module with a `reduction` (all of torch's losses) is asked for unreduced values, which are averaged or summed
    # over the positions of one sample as its own reduction says. Positions that equal its `ignore_index` count neither
    # in the sum nor in the divisor, so that a sample's loss never depends on another sample. For the same reason class
    # weights multiply, but the batch's total weight does not divide. Any other callable must return one loss per
    # sample.
    def __init__(self, clipper: GhostClipper, criterion: Callable[..., torch.Tensor]) -> None:
        own = getattr(criterion, "reduction", None)
        if own in ("mean", "sum") and own != clipper.loss_reduction:
            raise LossReductionError(
                f"criterion {type(criterion).__name__}(reduction={own!r}): the loss was declared with "
                f"loss_reduction={clipper.loss_reduction!r}. Say the same in both."
            )
        self.clipper = clipper
        self.criterion = criterion
        self.deferral: Defers | None = None  # None where losses are computed at once

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> PrivateLoss:
        """Return the loss of a batch; ``shape`` is `[B, T, ...]` of an output that was flattened to `[B·T, ...]`."""
        if self.deferral is not None:
            deferred = self.deferral.loss(args, kwargs if shape is None else {**kwargs, "shape": tuple(shape)})
            if deferred is not None:
                return deferred
            args, kwargs = self.deferral.resolved((args, kwargs))
        return PrivateLoss(self.clipper, self.per_sample(*args, shape=shape, **kwargs))

    def per_sample(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> torch.Tensor:
        """Return the losses of a batch's samples, `[B]`, from the criterion's arguments."""
        values = self._unreduced(args, kwargs)
        if not isinstance(values, torch.Tensor) or values.dim() == 0:
            raise LossReductionError(
                f"criterion {self._name()}: returned {values!r:.60}, not one loss per sample. Use a criterion with a "
                "`reduction` attribute or one that returns a tensor whose first axis is the batch."
            )
        keep = self._counted(values, args, kwargs)
        if shape is not None and values.shape[0] == shape[0] * shape[1]:
            values = values.reshape(shape[0], shape[1], *values.shape[1:])
            keep = None if keep is None else keep.reshape(values.shape)
        return self._per_sample(values, keep)

    def _unreduced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the criterion without its reduction, which is restored afterwards."""
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, **kwargs)
        own = self.criterion.reduction
        self.criterion.reduction = "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = own

    def _counted(self, values: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return a mask of the positions that count in a mean where the criterion ignores some, None if all count."""
        ignored = getattr(self.criterion, "ignore_index", None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignored is None or not isinstance(target, torch.Tensor) or target.shape != values.shape:
            return None
        return target != ignored

    def _per_sample(self, values: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """Reduce unreduced losses `[B, ...]` over all axes but the batch."""
        if values.dim() == 1:
            return values
        axes = tuple(range(1, values.dim()))
        if self.clipper.loss_reduction == "sum":
            return values.sum(dim=axes)
        if keep is None:
            return values.mean(dim=axes)
        return values.sum(dim=axes) / keep.sum(dim=axes).clamp(min=1)

    def _name(self) -> str:
        """Return the criterion's name for messages."""
        return getattr(self.criterion, "__name__", type(self.criterion).__name__)

    def __getattr__(self, name: str) -> Any:
        """Look up what this wrapper does not have on the criterion (`reduction`, `weight`, `to`, ...)."""
        if "criterion" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.criterion, name)
