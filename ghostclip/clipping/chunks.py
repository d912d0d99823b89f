"""Losses that are computed for a few positions of every sample at a time."""

from collections.abc import Callable

from torch import Tensor

from ghostclip.errors import InvalidOptionError, LossReductionError

LossesOf = Callable[[Tensor, slice], Tensor]
"""Called with the values at some positions and the slice that they are of; returns losses of the samples, ``(B,)``."""


def in_chunks(
    hidden: Tensor, losses_of: LossesOf, *, positions: int, axis: int, back: Callable[[Tensor, Tensor], None]
) -> tuple[Tensor, Tensor | None]:
    """Run the loss and its backward for one slice of positions after another."""
    # Returns the samples' losses (B,), without graph, and the gradient of `hidden`, None where no loss depends on it.
    # `back` runs the backward of a slice's losses; its second argument is the leaf that the slices are cut from.
    if hidden.dim() <= axis or axis < 1 or not hidden.requires_grad:
        raise InvalidOptionError(
            f"hidden of shape {tuple(hidden.shape)} with axis={axis}: expected what the model returned in its "
            "graph, samples along axis 0, and an axis of positions after it."
        )
    leaf = hidden.detach().requires_grad_()
    total_B = hidden.new_zeros(hidden.shape[0])
    for start in range(0, hidden.shape[axis], positions):
        at = slice(start, min(start + positions, hidden.shape[axis]))
        losses_B = losses_of(leaf.narrow(axis, at.start, at.stop - at.start), at)
        if losses_B.dim() != 1:
            raise LossReductionError(
                f"losses_of returned shape {tuple(losses_B.shape)}; expected the losses of the samples, (B,)."
            )
        back(losses_B, leaf)
        total_B += losses_B.detach()
    return total_B, leaf.grad
