"""The one walk over nested containers: arguments of operations, inputs and outputs of models, batches of loaders.

Containers are those of torch's pytree: tuples, lists, dicts, and what is registered there. A forward looks through
thousands of them, so that plain ones are walked here and only the others by pytree. A ``torch.Size`` is a leaf.
"""

import copy
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ghostclip import _torch

# Types of leaves that are seen at a glance.
_LEAVES: Final[set[Any]] = {
    type(None), bool, int, float, str, slice, EllipsisType, torch.Size, torch.dtype, torch.device, torch.layout
}  # fmt: skip

_SEEN: Final = _LEAVES | {Tensor}


_K = TypeVar("_K", bound=type)


def leaf(kind: _K) -> _K:
    """Let objects of a class be leaves, which no container can be."""
    _LEAVES.add(kind)
    _SEEN.add(kind)
    return kind


def leaves(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of a tree, in order, also those that are no tensors; ``is_leaf``: a container is one leaf."""
    gathered: list[Any] = []
    return gathered if _gather(tree, gathered) else _torch.tree_leaves(tree, is_leaf=is_leaf)


def _gather(item: Any, gathered: list[Any]) -> bool:
    """Gather the leaves of tuples, lists and dicts; False where something else may be a container as well."""
    kind = type(item)
    if kind is tuple or kind is list or kind is dict:
        for part in item.values() if kind is dict else item:
            if type(part) in _SEEN:
                gathered.append(part)
            elif not _gather(part, gathered):
                return False
        return True
    gathered.append(item)
    return kind in _LEAVES or isinstance(item, Tensor)


def tensors(tree: Any, *, into_objects: int = 0) -> list[Tensor]:
    """Return the tensors of a tree, in order; with repetitions where `into_objects` is 0."""
    # How deep to look into what is no container of pytree: mappings and the attributes of objects (a distribution, a
    # data class). Each tensor and each object then counts once.
    if type(tree) is Tensor:
        return [tree]
    if not into_objects:
        return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
    by_id: dict[int, Tensor] = {}
    pending, seen = [(tree, 0)], set()
    while pending:
        item, depth = pending.pop(0)
        for leaf in leaves(item):
            if isinstance(leaf, Tensor):
                by_id[id(leaf)] = leaf
            elif depth < into_objects and id(leaf) not in seen:
                seen.add(id(leaf))
                pending += [(part, depth + 1) for part in _parts(leaf)]
    return list(by_id.values())


def _parts(item: Any) -> list[Any]:
    """Return what an object holds that is no container of pytree."""
    if isinstance(item, Mapping):
        return [dict(item)]
    return [dict(vars(item))] if hasattr(item, "__dict__") and not callable(item) else []


def shapes_of(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors of a tree, in order, without calling overrides of their classes."""
    with _torch.overrides_off():
        return tuple([tuple(tensor.shape) for tensor in tensors(tree)])


def mapped(call: Callable[[Any], Any], tree: Any) -> Any:
    """Return new containers of the same kinds with every leaf replaced."""
    kind = type(tree)
    if kind is tuple or kind is list:
        items = [call(item) if type(item) in _SEEN else mapped(call, item) for item in tree]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {key: mapped(call, item) for key, item in tree.items()} if tree else {}
    if kind in _LEAVES or isinstance(tree, Tensor):
        return call(tree)
    return _torch.tree_map(call, tree)


class _Opened(dict[str, Any]):
    """What an object holds, in its place: a container, as the object is none."""

    def __init__(self, owner: Any, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.owner = owner

    def closed(self) -> Any:
        """Return a copy of the object that holds this."""
        made, held = copy.copy(self.owner), {name: closed(item) for name, item in self.items()}
        attributes = getattr(made, "__dict__", {})
        if isinstance(made, Mapping):
            for name, item in held.items():
                made[name] = item  # type: ignore[index]
            # Some mappings keep their items as attributes, too.
            held = {name: item for name, item in held.items() if name in attributes}
        attributes.update(held)
        return made


_torch.register_container(
    _Opened,
    lambda item: (list(item.values()), (item.owner, list(item))),
    lambda values, about: _Opened(about[0], dict(zip(about[1], values, strict=True))),
)


def opened(tree: Any, *, into_objects: int) -> Any:
    """Return a tree in which objects that hold tensors are containers, so deep; `closed` makes them objects again."""

    def open_leaf(leaf: Any) -> Any:
        held = [] if isinstance(leaf, Tensor) or not into_objects else _parts(leaf)
        if not held or not tensors(leaf, into_objects=into_objects):
            return leaf
        return _Opened(leaf, opened(held[0], into_objects=into_objects - 1))

    return mapped(open_leaf, tree)


def closed(tree: Any) -> Any:
    """Return a tree that was `opened` as it was, around the leaves that it has now."""
    return _torch.tree_map(
        lambda item: item.closed() if isinstance(item, _Opened) else item,
        tree,
        is_leaf=lambda item: isinstance(item, _Opened),
    )
