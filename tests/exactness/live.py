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

    def __init__(self, *, beside=()):
        """Count nothing yet; the memory of the tensors `beside` is not counted, also where a view of it is made."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known = {}
        self._beside = {tensor.untyped_storage()._cdata for tensor in beside}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        if storage._cdata in self._known or storage._cdata in self._beside:
            return
        self._known[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key):
        self.now -= self._known.pop(key)


def peak_of(step, *, beside=()):
    """Return the most bytes that a step's tensors took at a time, those `beside` it left out."""
    with LiveBytes(beside=beside) as live:
        step()
    return live.peak
