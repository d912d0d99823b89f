"""What a GPU can do at most, from its data sheet or measured, and what a step needs at least."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.timing import seconds


@dataclass(frozen=True)
class Peak:
    """FLOPs a second of dense products (float32: no TF32), bytes a second of a device, and whose figures they are."""

    bf16: float
    float32: float
    memory: float
    source: str = "data sheet"


# The first that matches; dense rates, not those of sparse matrices.
_SHEETS = (
    (r"H200", Peak(989e12, 67e12, 4.8e12)),
    (r"H100 NVL", Peak(835e12, 60e12, 3.9e12)),
    (r"H100 PCIe", Peak(756e12, 51e12, 2.0e12)),
    (r"H100", Peak(989e12, 67e12, 3.35e12)),
    (r"A100.*80GB", Peak(312e12, 19.5e12, 2.0e12)),
    (r"A100", Peak(312e12, 19.5e12, 1.555e12)),
    (r"L4\b", Peak(121e12, 30.3e12, 0.3e12)),
)


def on_the_sheet(name: str) -> Peak | None:
    """The rates of a device by its name."""
    return next((peak for pattern, peak in _SHEETS if re.search(pattern, name)), None)


def measured(device: torch.device, *, quick: bool) -> Peak:
    """The rates that large products and copies reach here."""
    size = 128 if quick else 8192
    rates = [2 * size**3 / _seconds_of_product(device, size, dtype) for dtype in (torch.bfloat16, torch.float32)]
    count = (1 << 16) if quick else (1 << 28)
    source, target = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    return Peak(*rates, 8 * count / seconds(lambda: target.copy_(source), device, rounds=5), "measured")


def _seconds_of_product(device: torch.device, size: int, dtype: torch.dtype) -> float:
    one, two = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return seconds(lambda: one @ two, device, rounds=5)


def peak_of(device: torch.device, *, quick: bool = False) -> Peak:
    """The rates of a device: its data sheet's, or else measured ones."""
    found = on_the_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return found or measured(device, quick=quick)


def flops_of_step(model: nn.Module, samples: int, length: int) -> float:
    """The products of an ordinary step: six operations a token and weight of a product; attention is not counted."""
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in tables)
    return 6.0 * weights * samples * length
