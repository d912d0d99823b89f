"""Kernels run on the GPU where there is one, and in Triton's interpreter everywhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.kernels import worker


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: kernels are not tested, their twins are")
    with worker.interpreter() as call:
        yield call


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def fast(request: pytest.FixtureRequest, poisoned_memory: None) -> Callable[..., Any]:
    """Call a kernel by name: tensors go to its device and the results come back."""
    del poisoned_memory
    if request.param == "cpu":
        return request.getfixturevalue("interpreter")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: kernels are not tested, their twins are")

    def call(name: str, *arguments: Any, **options: Any) -> Any:
        return _moved(worker.call_here(name, *_moved(arguments, "cuda"), **options), "cpu")

    return call


def _moved(values: Any, device: str) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to(device)
    if isinstance(values, tuple):
        moved = [_moved(value, device) for value in values]
        return type(values)(*moved) if hasattr(values, "_fields") else tuple(moved)
    return values
