"""Runs kernels in Triton's interpreter, in a process of its own.

Triton decides when it is first imported whether it interprets, and torch may have imported it by then.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from ghostclip import kernels

MATRIX_MODULES = ("gram", "outer", "rows", "affine")


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls a kernel in the interpreter: `call(name, arguments, programs)`."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

            def call(name: str, *arguments: Any, programs: int | None = None, **options: bool) -> Any:
                return _unpacked(pool.submit(_in_child, name, _packed(arguments), programs, options).result())

            call("symmetric_gram", torch.ones(0, 1, 1), torch.ones(0, 1, 1), 1)  # started while the variable is set
            del os.environ["TRITON_INTERPRET"]
            yield call
    finally:
        os.environ.pop("TRITON_INTERPRET", None)


def call_here(name: str, *arguments: Any, programs: int | None = None, **options: bool) -> Any:
    """Call a kernel in this process, with at most `programs` programs working on all samples."""
    if name in ("normal_pair", "noise_launches"):
        from tests.kernels import pairs

        return getattr(pairs, name)(*arguments)
    modules = [importlib.import_module(f"ghostclip.kernels._compiled.{module}") for module in MATRIX_MODULES]
    usual = [module._PROGRAMS for module in modules]
    fast = next(twins.fast for twins in kernels.TWINS if twins.name == name)
    try:
        for module, number in zip(modules, usual, strict=True):
            module._PROGRAMS = programs or number
        return fast(*arguments, **options)
    finally:
        for module, number in zip(modules, usual, strict=True):
            module._PROGRAMS = number


def _in_child(name: str, packed: bytes, programs: int | None, options: dict[str, bool]) -> bytes:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)  # numpy, where a sample is not finite
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return _packed(call_here(name, *_unpacked(packed), programs=programs, **options))


def _packed(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)
