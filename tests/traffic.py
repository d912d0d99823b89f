"""What work on a GPU would start and move, counted without one: on fake tensors whose device is "cuda"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts operations and the bytes that they read and write; `reads` are copies of a GPU's values to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes = 0
        self.peak = 0
        self.reads: list[tuple[str, int]] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in given if tensor.is_cuda]
        name = func.overloadpacket.__name__
        if on_gpu and (name == "_local_scalar_dense" or any(not tensor.is_cuda for tensor in made)):
            self.reads.append((name, sum(_size(tensor) for tensor in on_gpu)))
        if func.is_view or name in _FREE or not (on_gpu or any(tensor.is_cuda for tensor in made)):
            return out
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = [
            leaf
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(named[argument.name])
        ]
        fresh = [tensor for tensor in made if all(tensor is not one for one in written)]
        overwritten = written if name in _OVERWRITES or "out" in named else []
        self.launches += 1
        self.names.append(name)
        self.bytes += sum(_size(tensor) for tensor in (*given, *fresh, *written))
        self.bytes -= sum(_size(tensor) for tensor in overwritten)
        self.peak = max([self.peak, *(_size(tensor) for tensor in fresh)])
        return out


_FREE = {"device", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "_reshape_alias"}
_OVERWRITES = {"copy_", "normal_", "zero_", "fill_", "_foreach_copy_", "random_"}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def counted() -> Iterator[Traffic]:
    """Make fake tensors and count what is done with them; reading one raises."""
    with FakeTensorMode(), Traffic() as traffic:
        yield traffic
