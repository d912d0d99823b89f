"""The leaves of nested containers, quickly where they are the usual ones: a model's inputs are looked through often."""

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from ghostclip import _torch

_PLAIN: Final = frozenset({type(None), bool, int, float, str})


def leaves_of(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return what torch's pytree takes for the leaves of a tree, in order.

    Args:
        tree: Tuples, lists and dicts, and whatever else is registered with pytree.
        is_leaf: Tells of a container that it counts as a leaf.

    Returns:
        The leaves, those that are no tensors included.
    """
    found: list[Any] = []
    return found if _gather(tree, found) else _torch.tree_leaves(tree, is_leaf=is_leaf)


def _gather(item: Any, found: list[Any]) -> bool:
    """Gather the leaves of tuples, lists and dicts; False where something else may be a container as well."""
    kind = type(item)
    if kind is tuple or kind is list or kind is dict:
        for part in item.values() if kind is dict else item:
            if type(part) is Tensor:
                found.append(part)
            elif not _gather(part, found):
                return False
        return True
    found.append(item)
    return kind in _PLAIN or isinstance(item, Tensor)
