"""Runs kernels in Triton's interpreter, in a process of its own.

Triton decides when it is first imported whether it interprets, and torch may have imported it by then.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch

from ghostclip import kernels

PROGRAMS = ("triton_products._PROGRAMS", "triton_sums._ROW_PROGRAMS", "triton_sums._AFFINE_PROGRAMS")


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls a kernel in the interpreter: `call(name, arguments, programs)`."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

            def call(name: str, *arguments: Any, **options: Any) -> Any:
                return _unpacked(pool.submit(_in_child, name, _packed(arguments), options).result())

            call("symmetric_gram", torch.ones(0, 1, 1), torch.ones(0, 1, 1), 1)  # started while the variable is set
            del os.environ["TRITON_INTERPRET"]
            yield call
    finally:
        os.environ.pop("TRITON_INTERPRET", None)


def call_here(
    name: str,
    *arguments: Any,
    programs: int | None = None,
    workspace: int | None = None,
    enough: int | None = None,
    **options: bool,
) -> Any:
    """Call a kernel, or a function of `tests.kernels.pairs`, in this process.

    At most `programs` programs work on all samples, copies are of `workspace` elements, and `enough` large tiles are
    enough; as usual where nothing is given.
    """
    from tests.kernels import pairs

    fast = {pair.name: pair.fast for pair in kernels.TWINS} | pairs.FUNCTIONS
    limits = [
        *((name, programs) for name in (*PROGRAMS, "triton_products._WANTED")),
        ("triton_products._ENOUGH", enough),
    ]
    with ExitStack() as stack:
        for place, number in limits:
            if number is not None:
                stack.enter_context(mock.patch(f"ghostclip.kernels.{place}", number))
        if workspace is not None:
            stack.enter_context(mock.patch("ghostclip.kernels.runtime.elements", return_value=workspace))
        return fast[name](*arguments, **options)


def _in_child(name: str, packed: bytes, options: dict[str, Any]) -> bytes:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)  # numpy, where a sample is not finite
    # How the interpreter reads the bounds of a loop.
    warnings.filterwarnings("ignore", "Conversion of an array with ndim", DeprecationWarning)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return _packed(call_here(name, *_unpacked(packed), **options))


def _packed(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)
