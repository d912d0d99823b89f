"""Products in float32 that are products in float32, whatever precision was chosen for the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_FULL: Final = "ieee"


@contextmanager
def full_precision() -> Iterator[None]:
    """Keep backends from rounding float32 to TF32 or bfloat16 while norms and clipped sums are formed.

    ``torch.set_float32_matmul_precision("high")``, usual in training scripts, lets a product of two matrices round its
    operands to 10 bits, "medium" to 7: norms would be too small by 3e-4 of themselves. The model's own forward and
    backward keep what was chosen for them.

    Yields:
        Nothing.
    """
    changed = [(place, name, before, full) for place, name, before, full in _switches() if before != full]
    for place, name, _, full in changed:
        setattr(place, name, full)
    try:
        yield
    finally:
        for place, name, before, _ in changed:
            setattr(place, name, before)


def _switches() -> list[tuple[Any, str, Any, Any]]:
    """Return what decides on precision: where it lies, its name, its value now, and the value for full precision."""
    backends: Any = torch.backends
    if hasattr(backends.cudnn, "conv"):
        # The newer switches; reading the older ones is an error where somebody used the newer.
        places = [backends.mkldnn.matmul, backends.mkldnn.conv]
        if backends.cuda.is_built():
            places += [backends.cuda.matmul, backends.cudnn.conv]
        return [(place, "fp32_precision", place.fp32_precision, _FULL) for place in places]
    older = (backends.cuda.matmul, backends.cudnn)
    found: list[tuple[Any, str, Any, Any]] = [(place, "allow_tf32", place.allow_tf32, False) for place in older]
    return [*found, (_MatmulPrecision(), "chosen", torch.get_float32_matmul_precision(), "highest")]


class _MatmulPrecision:
    """The one switch of torch before 2.9 for products on CPUs."""

    @property
    def chosen(self) -> str:
        """What was chosen."""
        return torch.get_float32_matmul_precision()

    @chosen.setter
    def chosen(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)
