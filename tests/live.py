"""Bytes of tensors that are alive, counted operation by operation: exact where a process's resident set is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it make, until they are freed.

    Attributes:
        now: Bytes alive.
        peak: The most so far.
    """

    def __init__(self, *, beside: Iterable[Tensor] = ()) -> None:
        """Count nothing yet.

        Args:
            beside: Tensors whose memory is not counted, also where a view of it is made.
        """
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}
        self._beside = {tensor.untyped_storage()._cdata for tensor in beside}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or storage._cdata in self._beside:
            return
        self._known[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)


def peak_of(step: Callable[[], object], *, beside: Iterable[Tensor] = ()) -> int:
    """Return the most bytes that a step's tensors took at a time.

    Args:
        step: Runs it.
        beside: Tensors that are not counted: the model's, and the batch.

    Returns:
        Bytes.
    """
    with LiveBytes(beside=beside) as live:
        step()
    return live.peak
