"""What a graph was traced for: a batch of another form, or a model that was changed, needs another one.

Guarded are: shapes and dtypes of the batch, its plain values, the model's modules, parameters and buffers (number,
shape, dtype, device, whether they train), what modules hold in attributes (numbers, flags, functions, arrays of NumPy,
and lists, dicts and objects of such, four deep), autocast, and how samples are clipped. What a forward reads elsewhere
(a global variable, a number read off a tensor that is no buffer) is not, and must not change.
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
# What every module has of torch's own: its tables and hooks.
_TORCHS_OWN: Final = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, dict))
_DEPTH: Final = 4
_MISSING: Final = object()


class Watched:
    """A model in the state in which a graph was traced."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._slots = [_slot(model, name) for name in names]
        self._about = [_about(owner[key]) for owner, key in self._slots]
        self._sizes: list[tuple[Any, int]] = []
        self._plain: list[tuple[Any, Any, Any]] = []
        self._arrays: list[tuple[Any, Any, Any]] = []
        seen = set[int]()
        for module in model.modules():
            self._sizes += [(table, len(table)) for table in _torch.tables(module)]
            attributes = vars(module)
            seen.update(id(attributes[key]) for key in _TORCHS_OWN & attributes.keys())
            self._note(attributes, seen, _DEPTH)

    def _note(self, container: Any, seen: set[int], depth: int) -> None:
        """Note the values of a list or a dict, nested ones included."""
        if id(container) in seen:
            return
        seen.add(id(container))
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
                self._plain.append((container, key, value))
            elif isinstance(value, np.ndarray):
                self._arrays.append((container, key, value.copy()))
            elif depth and isinstance(value, (list, tuple, dict)) and not _is_weak(value):
                # That it is another one is seen by what it holds.
                self._plain.append((container, key, value))
                if not isinstance(value, tuple):
                    self._sizes.append((value, len(value)))
                self._note(value, seen, depth - 1)
            elif depth and hasattr(value, "__dict__") and not (isinstance(value, _OTHERS) or _is_ours(value)):
                self._note(vars(value), seen, depth - 1)

    def tensors(self) -> list[Tensor] | None:
        """Return the current parameters and buffers; None where the model was changed."""
        if any(len(container) != size for container, size in self._sizes):
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


def _is_ours(value: Any) -> bool:
    """Return whether an object is one that this package has left on a model, such as the account of its releases."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_weak(value: Any) -> bool:
    """Return whether a list only refers to tensors weakly, as torch's recurrent layers have one."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, ReferenceType) for one in value)


def _differs(current: Any, value: Any) -> bool:
    """Return whether an object was replaced by another that is not its equal."""
    if type(current) is not type(value):
        return True
    try:
        return bool(current != value)
    except (RuntimeError, ValueError):
        # Tensors or arrays in it have no one answer.
        return True


def _slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    _, parameters, buffers = _torch.tables(model.get_submodule(path))
    return (parameters if key in parameters else buffers), key


def _about(tensor: Any) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def form_of(tree: Any) -> Hashable | None:
    """Return the form of a batch."""
    # Containers, plain values, and of tensors shape (apart from samples), dtype, device. None where a value in it
    # cannot be compared.
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


def surroundings(kind: str) -> Hashable:
    """Return what besides batch and model decides on operations: autocast and its dtype, and torch's own modes."""
    autocast = tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for device in sorted({"cpu", kind})
    )
    return autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
