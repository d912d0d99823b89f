"""Reads of tensors' values by the host: on CUDA each waits for the device, on fake or meta tensors each is an error.

On a CPU nothing shows them. They are counted here where they are asked for: operations whose result the host looks at,
or whose result has a shape that values decide on, as ATen sees them, and functions that never reach it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
# Of ATen: the host takes a value, or the number of results depends on values.
_READING = frozenset(
    {
        "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
        "masked_select", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2",
        "repeat_interleave", "bincount",
    }
)  # fmt: skip
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_MASKS = frozenset({torch.bool, torch.uint8})
# Functions of a tensor in the memory of the CPU that copy nothing there and read it, or read it by no operation.
_COPYING = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__})


class HostReadError(RuntimeError):
    """A tensor's value was read where none may be."""


class HostReads:
    """The reads that were met.

    Attributes:
        places: What was read where, innermost lines of the library or its tests first.

    Args:
        refused: Raise at the first one.
    """

    def __init__(self, *, refused: bool) -> None:
        self.places: list[str] = []
        self._refused = refused

    def note(self, name: str) -> None:
        """Count a read.

        Args:
            name: What read.

        Raises:
            HostReadError: None is allowed.
        """
        frames = [frame for frame in traceback.extract_stack() if str(ROOT) in frame.filename]
        own = [frame for frame in frames if Path(frame.filename) != Path(__file__)]
        lines = [f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}" for frame in reversed(own[-4:])]
        self.places.append(f"{name} at {' < '.join(lines)}")
        if self._refused:
            raise HostReadError(self.places[-1])

    def __len__(self) -> int:
        """How many there were."""
        return len(self.places)

    def __str__(self) -> str:
        """One line for each."""
        return "\n".join(self.places)


class _Operations(TorchDispatchMode):
    """Sees what reaches ATen."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        name = func.overloadpacket.__name__
        if name in _READING and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            self._reads.note(name)
        elif name in _INDEXING and any(item is not None and item.dtype in _MASKS for item in args[1]):
            self._reads.note(f"{name} by a mask")
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Sees what never reaches ATen."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPYING or (func is Tensor.to and _is_to_cpu([*args[1:], *kwargs.values()])):
            self._reads.note(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)


def _is_to_cpu(arguments: Sequence[Any]) -> bool:
    # Where everything lies on a CPU, a device is that of another tensor and would be the GPU.
    return any(item == "cpu" for item in arguments if isinstance(item, str))


@contextmanager
def host_reads(*, refused: bool = False) -> Iterator[HostReads]:
    """Count the reads of a block.

    Args:
        refused: Raise at the first one.

    Yields:
        What is filled as they come.
    """
    reads = HostReads(refused=refused)
    with _Operations(reads), _Functions(reads):
        yield reads
