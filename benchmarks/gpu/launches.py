"""Kernels of ours on tensors without data: what starts one runs, and the start is noted in the place of the kernel.

Nothing but what Triton compiles is replaced, so that launches, copies and memory beside them are those of a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from ghostclip import kernels
from ghostclip.kernels import runtime

_MODULES = ("ghostclip.kernels.triton_products", "ghostclip.kernels.triton_sums")


@dataclass(frozen=True)
class Launch:
    """One start of a kernel."""

    name: str
    flops: int
    tensors: tuple[Tensor, ...]


Listener = Callable[[Launch], None]


def _whole(length: int, tile: int) -> int:
    return ceil(length / tile) * tile


def _of_gram(given: Mapping[str, Any], grid: tuple[int, ...]) -> int:
    entries = given["BLOCK"] ** 2 * given["tiles"] * (given["tiles"] + 1) // 2
    return 2 * grid[0] * entries * (given["inputs"] + given["outputs"])


def _of_gradient(given: Mapping[str, Any], samples: int) -> int:
    area = _whole(given["inputs"], given["BLOCK"]) * _whole(given["outputs"], given["BLOCK"])
    return 2 * samples * _whole(given["positions"], given["BLOCK_T"]) * area


_FLOPS: Mapping[str, Callable[[Mapping[str, Any], tuple[int, ...]], int]] = {
    "_gram": _of_gram,
    "_square": lambda given, grid: _of_gradient(given, grid[0]),
    "_weighted_sum": lambda given, grid: _of_gradient(given, given["samples"] * grid[2]),
}


class _Kernel:
    """Stands for a compiled kernel: `kernel[grid](...)` tells the listener."""

    def __init__(self, function: Callable[..., None], listeners: list[Listener]) -> None:
        self._name, self._listeners = function.__name__, listeners
        self._names = list(inspect.signature(function).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*arguments: Any, **options: Any) -> None:
            given = {**dict(zip(self._names, arguments, strict=False)), **options}
            flops = _FLOPS.get(self._name, lambda *_: 0)(given, grid)
            tensors = tuple(value for value in given.values() if isinstance(value, Tensor))
            self._listeners[-1](Launch(self._name, flops, tensors))

        return start


def _triton(listeners: list[Listener]) -> dict[str, ModuleType]:
    """What the modules of kernels need of Triton when they are imported."""
    whole, language = ModuleType("triton"), ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    whole.language = language  # type: ignore[attr-defined]
    whole.jit = lambda function: _Kernel(function, listeners)  # type: ignore[attr-defined]
    whole.cdiv = lambda length, tile: -(-length // tile)  # type: ignore[attr-defined]
    whole.next_power_of_2 = lambda length: 1 << (length - 1).bit_length()  # type: ignore[attr-defined]
    return {"triton": whole, "triton.language": language}


@contextmanager
def kernels_noted(listeners: list[Listener]) -> Iterator[None]:
    """Let kernels be used, as on a GPU where all were switched on, for tensors without data."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules))
        for name in _MODULES:
            sys.modules.pop(name, None)
        with mock.patch.dict(sys.modules, _triton(listeners)):
            loaded = {name: importlib.import_module(name) for name in _MODULES}
        sys.modules.update(loaded)
        stack.enter_context(mock.patch.object(runtime, "runs_on", lambda device: device.type == "meta"))
        stack.enter_context(mock.patch.object(runtime.Twins, "trusted", return_value=True))
        stack.enter_context(kernels.using("auto"))
        yield
