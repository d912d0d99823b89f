"""Stands for torchvision where it cannot be installed beside this torch, as far as timm imports it.

timm needs one class of it (a frozen batch norm) and the names of data sets and transforms, which its models do not use.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn


class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose statistics, weight and bias are buffers, as torchvision has it."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the kept statistics."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class _Module(types.ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, made)
        return made


def timm() -> Any:
    """Return timm, with this in the place of torchvision where that is missing."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, AttributeError):
        with _in_place():
            return importlib.import_module("timm")
    return importlib.import_module("timm")


@contextmanager
def _in_place() -> Iterator[None]:
    """Let the names be importable, and take them away again: other libraries ask whether there is a torchvision."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}
    names = ("torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms", "torchvision.datasets")
    for name in (*names, "torchvision.transforms.functional"):
        module = _Module(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = FrozenBatchNorm2d  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].InterpolationMode = _Modes  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules.update(before)


class _Modes:
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = (
        "nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"
    )  # fmt: skip
