"""Losses, as a clipper's backward takes them: checks of their shape, classes on several ranks, positions in chunks.

Of logits whose classes lie on several ranks (``loss_parallel``) every rank has whole losses of the samples, DTensors,
and its classes' part of the logits' gradient. torch computes that part within the context alone, and for cross-entropy
alone; whatever else it would leave out is refused here.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.nodes import edge_of
from ghostclip.errors import InvalidOptionError, LossReductionError
from ghostclip.evidence.linear_paths import CLASSES
from ghostclip.evidence.loss_graph import above_outputs

LossesOf = Callable[[Tensor, slice], Tensor]
"""Called with the values at some positions and the slice that they are of; returns losses of the samples, ``(B,)``."""
# They show the same values in another shape.
_VIEWS: Final = re.compile("(View|UnsafeView|ReshapeAlias|Alias|Transpose|Permute|T)Backward0")
_SOFTMAX: Final = "LogSoftmaxBackward0"
_OUTSIDE: Final = (
    "the cross-entropy of logits whose classes lie on several ranks has its gradient within loss_parallel() alone: "
    "call backward() inside the context that the loss was computed in."
)
_NOT_FUSED: Final = (
    "'{}' takes a log_softmax that loss_parallel() computed, to which torch gives no gradient of its own. Use "
    "F.cross_entropy(logits, labels, reduction='none') there, or whole logits: logits.full_tensor()."
)


def back_propagate(loss: Tensor) -> None:
    """Back-propagate the sum of losses ``(B,)``, or a scalar."""
    # A gradient of ones instead of a sum is two operations fewer, and their nodes; and what `loss.backward` checks on
    # the way to autograd takes half as long as a small backward does.
    ones = torch.ones_like(loss)
    if type(loss) is not Tensor or not loss.requires_grad:
        loss.backward(ones)
    else:
        _torch.run_backward((loss,), (ones,))


def check_shape(loss: Tensor, *, batch_size: int) -> None:
    """Refuse a loss that is neither one value per sample nor a scalar; an empty batch has losses of any length."""
    if loss.dim() > 1:
        raise LossReductionError(
            f"the loss has shape {tuple(loss.shape)}; expected per-sample losses of shape (B,) or a scalar. "
            "Remove extra axes with loss.flatten() or loss.squeeze(1) where there is one value per sample."
        )
    if loss.dim() == 1 and batch_size and loss.shape[0] != batch_size:
        raise LossReductionError(
            f"{loss.shape[0]} losses were given for a batch of {batch_size} samples. Reduce the loss over everything "
            "but the samples (reduction='none', then a mean over each sample's own positions)."
        )


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


def plain_losses(loss: Tensor) -> Tensor:
    """Return losses of the samples as a plain tensor, in the graph."""
    # Refuse a DTensor in parts, or one that is reduced.
    if _torch.is_sharded_tensor(loss):
        placed: Any = loss
        if loss.dim() == 0 or not all(one.is_replicate() for one in placed.placements):
            _refuse_on_mesh(loss)
    return _torch.part_of(loss)


def _refuse_on_mesh(root: Any) -> None:
    """Refuse a backward that starts at a DTensor: whose rows are summed there is not proved."""
    if _torch.is_sharded_tensor(root):
        raise LossReductionError(
            f"the loss is a DTensor of shape {tuple(root.shape)}, placed as {', '.join(map(str, root.placements))}: "
            "whose rows it sums is not proved there. Give whole losses of the samples to clipper.backward(losses), or "
            "take them off the mesh before they are summed: F.cross_entropy(logits, labels, reduction='none')"
            ".to_local(), or ghostclip.losses.token_losses(logits, labels)."
        )


def refuse_lost_gradient(roots: Sequence[Any]) -> None:
    """Refuse a loss on a mesh, or one of divided logits whose gradient torch would leave out."""
    # The backward is outside of `loss_parallel`, or a log-softmax inside enters something else than a cross-entropy.
    for root in roots:
        _refuse_on_mesh(root)
    within = _torch.in_loss_parallel()
    fused: set[Any] = set()
    for node, inputs in above_outputs(map(edge_of, roots)):
        is_loss = node.name() in CLASSES and _torch.is_sharded_tensor(_torch.saved_or(node, "self", None))
        if is_loss and not within:
            raise LossReductionError(_OUTSIDE)
        if is_loss or (node in fused and _VIEWS.fullmatch(node.name())):
            fused.update(before for before, _ in inputs)
        elif within:
            _refuse_softmax(node, [before for before, _ in inputs])


def _refuse_softmax(node: Any, before: Iterable[Any]) -> None:
    """Refuse an operation that is no part of a cross-entropy and takes a log-softmax, maybe in another shape."""
    for taken in before:
        one = taken
        while _VIEWS.fullmatch(one.name()) and one.next_functions[0][0] is not None:
            one = one.next_functions[0][0]
        if one.name() == _SOFTMAX and _torch.is_sharded_tensor(_torch.saved_or(one, "result", None)):
            raise LossReductionError(_NOT_FUSED.format(re.sub("Backward[0-9]*$", "", node.name())))
