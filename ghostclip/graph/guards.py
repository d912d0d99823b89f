"""What a graph was traced for: a batch of another form, or a model that was changed, needs another one.

Guarded are: shapes and dtypes of the batch, its plain values, the model's modules and parameters (by identity) and
buffers (number), of these shape, dtype, device and whether they train, what modules and the loss hold in attributes
(numbers, flags, functions, hooks, tensors, arrays of NumPy, and lists, dicts and objects of such, four deep; attributes
that are added; another object in the place of one), autocast, and how samples are clipped. What a forward reads
elsewhere (a global variable, a closure, a number read off a tensor that is no buffer) is not, and must not change.
Where tensors that samples have in common hold other values than in the trace, the eager engine computes the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip import _torch

_PLAIN: Final = (int, float, bool, str, type(None), torch.dtype, torch.device)
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType, partial)
# What is not looked into: it is watched by other means, or nobody's.
_OTHERS: Final = (nn.Module, Tensor, type, ModuleType)
_DEPTH: Final = 4
_MISSING: Final = object()


class Watched:
    """Records a model and its loss as a graph was traced, to see whether they have changed since."""

    def __init__(self, model: nn.Module, names: Sequence[str], loss: Any, constants: Sequence[Tensor]) -> None:
        """Record tables, attributes and the forms of the tensors that the graph is given."""
        # `constants`: tensors that the graph holds; an attribute that had one must still have it.
        self._slots = [_slot(model, name) for name in names]  # (table, key) of what the graph is given
        self._about = [_about(owner[key]) for owner, key in self._slots]  # their forms
        # Modules and parameters, tied ones in each of their places: an optimizer knows them by identity.
        self._objects: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []  # (table or container, its length)
        self._keys: list[tuple[dict[str, Any], frozenset[str]]] = []  # (a module's attributes, their names)
        self._plain: list[tuple[Any, Any, Any]] = []  # (container, key, value) of other values
        self._arrays: list[tuple[Any, Any, Any]] = []  # (container, key, copy) of arrays
        seen = set[int]()
        self._constants = frozenset(map(id, constants))
        self._modules = list(model.modules())
        self._kinds = list(map(type, self._modules))
        for module in self._modules:
            self._sizes += [(table, len(table)) for table in _torch.tables(module)]
            children, parameters, _ = _torch.tables(module)
            self._objects += [(table, key, value) for table in (children, parameters) for key, value in table.items()]
            attributes = vars(module)
            self._keys.append((attributes, frozenset(attributes)))
            seen.update(map(id, _torch.tables(module)))
            self._record(attributes, seen, _DEPTH)
        for each in _behind(loss):
            self._record(getattr(each, "__dict__", {}), seen, _DEPTH)

    def _record(self, container: Any, seen: set[int], depth: int) -> None:
        """Record the values of a list or a dict, nested ones included."""
        if id(container) in seen:
            return
        seen.add(id(container))
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, np.ndarray):
                self._arrays.append((container, key, value.copy()))
            elif not (_is_ours(value) or _is_weak(value) or self._is_left_by_forwards(value)):
                # That it is another one is also seen by what it holds.
                self._plain.append((container, key, value))
                if depth and isinstance(value, (list, tuple, dict)):
                    if not isinstance(value, tuple):
                        self._sizes.append((value, len(value)))
                    self._record(value, seen, depth - 1)
                elif depth and hasattr(value, "__dict__") and not isinstance(value, (*_OTHERS, *_FUNCTIONS)):
                    self._record(vars(value), seen, depth - 1)

    def _is_left_by_forwards(self, value: Any) -> bool:
        """Return whether a value is a tensor that the graph does not read, such as the latest activations."""
        return isinstance(value, Tensor) and id(value) not in self._constants

    def tensors(self) -> list[Tensor] | None:
        """Return the current parameters and buffers; None where the model was changed."""
        if list(map(type, self._modules)) != self._kinds or any(len(table) != size for table, size in self._sizes):
            return None
        if any(table.get(key) is not value for table, key, value in self._objects):
            return None
        if any(not _is_ours(attributes[key]) for attributes, keys in self._keys for key in attributes.keys() - keys):
            return None
        for container, key, value in self._plain:
            current = container[key] if isinstance(container, (list, tuple)) else container.get(key, _MISSING)
            if current is not value and _differs(current, value):
                return None
        if any(not np.array_equal(container[key], value) for container, key, value in self._arrays):
            return None
        current = [owner.get(key) for owner, key in self._slots]
        if any(about != _about(tensor) for about, tensor in zip(self._about, current, strict=True)):
            return None
        return current


def _behind(loss: Any) -> list[Any]:
    """Return the objects whose attributes a loss reads: the one that a method is of, what a partial function holds."""
    if isinstance(loss, nn.Module):
        return list(loss.modules())
    if isinstance(loss, partial):
        return [part for item in (loss.func, *loss.args, *loss.keywords.values()) for part in _behind(item)]
    return _behind(loss.__self__) if isinstance(loss, MethodType) else [loss]


def _is_ours(value: Any) -> bool:
    """Return whether an object is one that this package has left on a model, such as the account of its releases."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_weak(value: Any) -> bool:
    """Return whether a list only refers to tensors weakly, as torch's recurrent layers have one."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, ReferenceType) for one in value)


def _differs(current: Any, value: Any) -> bool:
    """Return whether an object was replaced by another that is not its equal."""
    if type(current) is not type(value) or isinstance(value, Tensor):
        return True
    try:
        return bool(current != value)
    except (RuntimeError, ValueError):
        # Tensors or arrays in it have no one answer.
        return True


def _slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the table that holds a parameter or buffer, and its key there."""
    path, _, key = name.rpartition(".")
    _, parameters, buffers = _torch.tables(model.get_submodule(path))
    return (parameters if key in parameters else buffers), key


def _about(tensor: Any) -> tuple[Any, ...]:
    """Return what of a tensor a graph depends on."""
    if tensor is None:
        return ()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def form_of(tree: Any) -> Hashable | None:
    """Return what equal batches have in common: structure, plain values, shapes, dtypes; None if incomparable."""
    leaves, structure = _torch.tree_flatten(tree)
    forms: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            forms.append((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            forms.append((type(leaf), leaf))
        else:
            return None
    return str(structure), tuple(forms)


def autocasts(kind: str) -> tuple[tuple[str, Any], ...]:
    """Return to which dtype autocast casts on a CPU and on a type of device; False where it is off."""
    return tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for device in sorted({"cpu", kind})
    )


def surroundings(kind: str) -> Hashable:
    """Return what besides batch and model decides on operations: autocast and its dtype, and torch's own modes."""
    return autocasts(kind), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
