"""Losses of logits whose classes lie on several ranks (``loss_parallel``): what is back-propagated of them.

Every rank has whole losses of the samples, as DTensors, and its classes' part of the logits' gradient. torch computes
that part within the context alone, and for cross-entropy alone; whatever else it would leave out is refused here.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.nodes import edge_of
from ghostclip.errors import LossReductionError
from ghostclip.evidence.linear_paths import CLASSES
from ghostclip.evidence.loss_graph import above_outputs

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


def plain_losses(loss: Tensor) -> Tensor:
    """Return losses of the samples as a plain tensor, in the graph."""
    # Refuse a DTensor in parts, or one that is reduced.
    if _torch.is_sharded_tensor(loss):
        placed: Any = loss
        if loss.dim() == 0 or not all(one.is_replicate() for one in placed.placements):
            refuse_on_mesh(loss)
    return _torch.part_of(loss)


def refuse_on_mesh(root: Any) -> None:
    """Refuse a backward that starts at a DTensor: whose rows are summed there is not proved."""
    if _torch.is_sharded_tensor(root):
        raise LossReductionError(
            f"the loss is a DTensor of shape {tuple(root.shape)}, placed as {', '.join(map(str, root.placements))}: "
            "whose rows it sums is not proved there. Give whole losses of the samples to clipper.backward(losses), or "
            "take them off the mesh before they are summed: F.cross_entropy(logits, labels, reduction='none')"
            ".to_local(), or ghostclip.losses.token_losses(logits, labels)."
        )


def refuse_lost_gradients(roots: Iterable[Any]) -> None:
    """Refuse a loss of divided logits whose gradient torch would leave out."""
    # The backward is outside of `loss_parallel`, or a log-softmax inside enters something else than a cross-entropy.
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
