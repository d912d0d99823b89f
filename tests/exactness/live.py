"""Bytes of tensors that are alive, counted operation by operation: exact where a process's resident set is not."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it make, until they are freed.

    Attributes:
        now: Bytes alive.
        peak: The most so far.
    """

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        if storage._cdata in self._known:
            return
        self._known[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key):
        self.now -= self._known.pop(key)


def peak_of(step):
    """Return the most bytes that a step's tensors took at a time."""
    with LiveBytes() as live:
        step()
    return live.peak
