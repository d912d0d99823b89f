"""Products in float32 that are products in float32, whatever precision was chosen for the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch

_Switch: TypeAlias = tuple[Any, str, tuple[Any, ...]]
"""What decides on precision: where it lies, its name, and the values of full precision, the one that is set first."""

_AS_IT_IS: Final = nullcontext()
# Devices for which autocast may be on.
_KINDS: Final = ("cpu", "cuda")


def full_precision() -> AbstractContextManager[None]:
    """Return a context in which neither backends nor autocast round the operands of norms and clipped sums."""
    # torch.set_float32_matmul_precision("high"), usual in training scripts, rounds operands of a product to 10 bits,
    # "medium" and autocast to 7: norms would be too small by 3e-4. The model's own forward and backward keep what was
    # chosen for them, so that this is entered for every layer. Of torch's other switches, those of reductions in 16
    # bits do not matter to products with a float32 result.
    kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    if kinds:
        return _without_autocast(kinds)
    return _full(_switches())


def full_convolutions() -> AbstractContextManager[None]:
    """Return a context that does for convolutions what `full_precision` does for products; GPUs use TF32 by default."""
    return _full(_convolution_switches())


def _full(switches: Sequence[_Switch]) -> AbstractContextManager[None]:
    lower = [switch for switch in switches if getattr(switch[0], switch[1]) not in switch[2]]
    return _switched(lower) if lower else _AS_IT_IS


@contextmanager
def _without_autocast(kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_full(_switches()))
        yield


@contextmanager
def _switched(switches: Sequence[_Switch]) -> Iterator[None]:
    before = [getattr(place, name) for place, name, _ in switches]
    for place, name, full in switches:
        setattr(place, name, full[0])
    try:
        yield
    finally:
        for (place, name, _), value in zip(switches, before, strict=True):
            setattr(place, name, value)


@lru_cache(maxsize=1)
def _switches() -> list[_Switch]:
    backends: Any = torch.backends
    gpu = backends.cuda.matmul
    if not hasattr(backends.cudnn, "conv"):
        return [(gpu, "allow_tf32", (False,)), (_MatmulPrecision(), "chosen", ("highest",)), *_accumulation(gpu)]
    # The newer switches; reading the older ones is an error where somebody used the newer. "none" says that nobody
    # chose anything, here or for all backends, which on a GPU is not always full precision.
    cpu = (backends.mkldnn.matmul, "fp32_precision", ("ieee", "none"))
    return [cpu, (gpu, "fp32_precision", ("ieee",)), *_accumulation(gpu)] if backends.cuda.is_built() else [cpu]


def _accumulation(gpu: Any) -> list[_Switch]:
    # Sums of float16 products in float16, from torch 2.7 on.
    return [(gpu, "allow_fp16_accumulation", (False,))] if hasattr(gpu, "allow_fp16_accumulation") else []


@lru_cache(maxsize=1)
def _convolution_switches() -> list[_Switch]:
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return [(backends.cudnn, "allow_tf32", (False,))]
    cpu = (backends.mkldnn.conv, "fp32_precision", ("ieee", "none"))
    return [cpu, (backends.cudnn.conv, "fp32_precision", ("ieee",))] if backends.cuda.is_built() else [cpu]


class _MatmulPrecision:
    """The one switch of torch before 2.9 for products on CPUs."""

    @property
    def chosen(self) -> str:
        """What was chosen."""
        return torch.get_float32_matmul_precision()

    @chosen.setter
    def chosen(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)
