"""What a model's inputs say about a forward: the number of samples, empty batches, activation checkpointing."""

from typing import Any, Final

from torch import Tensor

from ghostclip import _torch
from ghostclip._tree import leaves as leaves_of
from ghostclip.capture.packed import is_packed
from ghostclip.errors import BatchAxisError

# Where keyword inputs begin: their order says nothing.
_MAIN_INPUTS: Final = ("input_ids", "inputs_embeds", "pixel_values", "input_features")


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int:
    """Return the number of samples in a model's inputs: the batch axis of the first tensor."""
    if args and type(args[0]) is Tensor and args[0].dim() > axis:
        return args[0].shape[axis]
    first = [kwargs[key] for key in _MAIN_INPUTS if key in kwargs] if kwargs else []
    for tree in (args, first, kwargs):
        for leaf in leaves_of(tree, is_leaf=is_packed):
            if is_packed(leaf):
                return int(leaf.batch_sizes[0])
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.shape[axis if axis < leaf.dim() else 0]
    message = "the model was called without a tensor that has a batch axis, so the number of samples is unknown."
    raise BatchAxisError(message)


def with_dummy(item: Any, axis: int) -> Any:
    """Return zeros for one dummy sample instead of a tensor without samples; anything else as it is."""
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    place = axis if axis < item.dim() else 0
    if item.shape[place] != 0:
        return item
    shape = list(item.shape)
    shape[place] = 1
    return item.new_zeros(shape)


def without_dummy(item: Any, axis: int) -> Any:
    """Return a tensor of one sample without its dummy, a view of size 0; anything else as it is."""
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    place = axis if axis < item.dim() else 0
    return item.narrow(place, 0, 0) if item.shape[place] == 1 else item


def under_checkpoint() -> bool:
    """Return whether activation checkpointing of the non-reentrant kind is active right now."""
    hooks: Any = _torch.saving_hooks()
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")


# Whether a backward is running on this thread.
in_backward: Final = _torch.in_backward
