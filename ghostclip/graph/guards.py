"""What a graph was traced for: a batch of another form, or a model that was changed, needs another one.

Guarded are: shapes and dtypes of the batch, its plain values, the model's modules and parameters (by identity) and
buffers (number), of these shape, dtype, device and whether they train, what modules and the loss hold in attributes
(numbers, flags, functions, tensors, arrays of NumPy, and lists, dicts and objects of such, four deep; attributes that
are added), autocast, and how samples are clipped. What a forward reads elsewhere (a global variable, a number read off
a tensor that is no buffer) is not, and must not change. Where tensors that samples have in common hold other values
than in the trace, the eager engine computes the batch.
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
    """A model and its loss in the state in which a graph was traced."""

    def __init__(self, model: nn.Module, names: Sequence[str], loss: Any, constants: Sequence[Tensor]) -> None:
        # `constants`: tensors that the graph holds; an attribute that had one must still have it.
        self._slots = [_slot(model, name) for name in names]
        self._about = [_about(owner[key]) for owner, key in self._slots]
        # Modules and parameters, tied ones in each of their places: an optimizer knows them by identity.
        self._objects: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._keys: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._plain: list[tuple[Any, Any, Any]] = []
        self._arrays: list[tuple[Any, Any, Any]] = []
        seen = set[int]()
        self._constants = frozenset(map(id, constants))
        self._modules = list(model.modules())
        self._kinds = list(map(type, self._modules))
        for module in self._modules:
            self._sizes += [(own, len(own)) for own in _torch.tables(module)]
            children, parameters, _ = _torch.tables(module)
            self._objects += [(own, key, value) for own in (children, parameters) for key, value in own.items()]
            self._keys.append((vars(module), frozenset(vars(module))))
            seen.update(id(own) for key, own in vars(module).items() if key in _TORCHS_OWN)
            self._note(vars(module), seen, _DEPTH)
        for each in loss.modules() if isinstance(loss, nn.Module) else [loss]:
            self._note(getattr(each, "__dict__", {}), seen, _DEPTH)

    def _note(self, own: Any, seen: set[int], depth: int) -> None:
        """Note the values of a list or a dict, nested ones included."""
        if id(own) in seen:
            return
        seen.add(id(own))
        for key, value in own.items() if isinstance(own, dict) else enumerate(own):
            if isinstance(value, (*_PLAIN, *_FUNCTIONS)) or id(value) in self._constants:
                self._plain.append((own, key, value))
            elif isinstance(value, np.ndarray):
                self._arrays.append((own, key, value.copy()))
            elif depth and isinstance(value, (list, tuple, dict)) and not _is_weak(value):
                # That it is another one is seen by what it holds.
                self._plain.append((own, key, value))
                if not isinstance(value, tuple):
                    self._sizes.append((value, len(value)))
                self._note(value, seen, depth - 1)
            elif depth and hasattr(value, "__dict__") and not (isinstance(value, _OTHERS) or _is_ours(value)):
                self._note(vars(value), seen, depth - 1)

    def tensors(self) -> list[Tensor] | None:
        """Return the current parameters and buffers; None where the model was changed."""
        if list(map(type, self._modules)) != self._kinds or any(len(own) != size for own, size in self._sizes):
            return None
        if any(own.get(key) is not value for own, key, value in self._objects):
            return None
        if any(not _is_ours(own[key]) for own, keys in self._keys for key in own.keys() - keys):
            return None
        for own, key, value in self._plain:
            found = own[key] if isinstance(own, (list, tuple)) else own.get(key, _MISSING)
            if found is not value and _differs(found, value):
                return None
        if any(not np.array_equal(own[key], value) for own, key, value in self._arrays):
            return None
        found = [owner.get(key) for owner, key in self._slots]
        if any(about != _about(tensor) for about, tensor in zip(self._about, found, strict=True)):
            return None
        return found


def _is_ours(value: Any) -> bool:
    """Return whether an object is one that this package has left on a model, such as the account of its releases."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_weak(value: Any) -> bool:
    """Return whether a list only refers to tensors weakly, as torch's recurrent layers have one."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, ReferenceType) for one in value)


def _differs(found: Any, value: Any) -> bool:
    """Return whether an object was replaced by another that is not its equal."""
    if type(found) is not type(value) or isinstance(value, Tensor):
        return True
    try:
        return bool(found != value)
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
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return str(structure), tuple(found)


def autocasts(kind: str) -> tuple[tuple[str, Any], ...]:
    """Return to which dtype autocast casts on a CPU and on a type of device; False where it is off."""
    return tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for device in sorted({"cpu", kind})
    )


def surroundings(kind: str) -> Hashable:
    """Return what besides batch and model decides on operations: autocast and its dtype, and torch's own modes."""
    return autocasts(kind), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
