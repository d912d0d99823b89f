"""Products in float32 that are products in float32, whatever precision was chosen for the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch

_Switch: TypeAlias = tuple[Any, str, tuple[Any, ...]]
"""What decides on precision: where it lies, its name, and the values of full precision, the one that is set first."""

_AS_IT_IS: Final = nullcontext()


def full_precision() -> AbstractContextManager[None]:
    """Keep backends from rounding float32 to TF32 or bfloat16 while norms and clipped sums are formed.

    ``torch.set_float32_matmul_precision("high")``, usual in training scripts, lets a product of two matrices round its
    operands to 10 bits, "medium" to 7: norms would be too small by 3e-4 of themselves. The model's own forward and
    backward keep what was chosen for them, so that this is entered for every layer.

    Returns:
        What the products go inside of; nothing is switched where nothing has to be.
    """
    switches = _switches()
    for place, name, full in switches:
        if getattr(place, name) not in full:
            return _switched(switches)
    return _AS_IT_IS


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
    if hasattr(backends.cudnn, "conv"):
        # The newer switches; reading the older ones is an error where somebody used the newer. "none" says that nobody
        # chose anything, here or for all backends, which on a GPU is not always full precision.
        cpu, gpu = [backends.mkldnn.matmul, backends.mkldnn.conv], [backends.cuda.matmul, backends.cudnn.conv]
        found = [(place, "fp32_precision", ("ieee", "none")) for place in cpu]
        return [*found, *((place, "fp32_precision", ("ieee",)) for place in gpu if backends.cuda.is_built())]
    older = (backends.cuda.matmul, backends.cudnn)
    return [*((place, "allow_tf32", (False,)) for place in older), (_MatmulPrecision(), "chosen", ("highest",))]


class _MatmulPrecision:
    """The one switch of torch before 2.9 for products on CPUs."""

    @property
    def chosen(self) -> str:
        """What was chosen."""
        return torch.get_float32_matmul_precision()

    @chosen.setter
    def chosen(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)
