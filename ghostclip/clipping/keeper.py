"""What is held of a factor from its norm to its contraction: the factor itself, or its numbers in 16 bits.

A factor that is held in 16 bits is rounded before its norm is taken, and it is the rounded one that is contracted: what
is added has the norm that was computed for it.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from collections.abc import Collection
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.factors import Dense, Factor, Outer
from ghostclip.kernels import products

ROUNDED: Final = torch.bfloat16
"""The type of 16 bits: gradients of 1e-8 are ordinary numbers of it, as in float32; in float16 they are zero."""

HeldFactor: TypeAlias = Factor | Tensor
"""A factor, or per-sample gradients ``(B, *P)`` in 16 bits."""


class Keeper:
    """Rounds the factors of some parameters in one backward."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._copies: dict[Any, tuple[ReferenceType[torch.UntypedStorage], int, Tensor]] = {}

    def rounded(self, name: str, factor: Factor, *, readers: dict[int, int] | None = None, own: bool = False) -> Factor:
        """Return the factor that is measured, stored and contracted: rounded to 16 bits, or the factor itself."""
        # readers: number of uses that read the memory at an address; copies' addresses are added. own: nobody else
        # reads the numbers of a factor that are gradients.
        if name not in self._names:
            return factor
        if type(factor) is Dense and _is_wide(factor.grad_BP):
            half_BP = factor.grad_BP.to(ROUNDED)
            return Dense(factor.grad_BP.copy_(half_BP) if own else half_BP)
        if type(factor) is not Outer or not (_is_wide(factor.a_NTI) and _is_wide(factor.g_NTO)):
            return factor
        copies = []
        for x_NTF in (factor.a_NTI, factor.g_NTO):
            copies.append(self._copy_of(x_NTF))
            if readers is not None and readers.get(x_NTF.data_ptr(), 0):
                readers[copies[-1].data_ptr()] = readers[x_NTF.data_ptr()]
        return Outer(*copies, shape=factor.shape, slots=factor.slots)

    def _copy_of(self, x_NTF: Tensor) -> Tensor:
        """Return a tensor in 16 bits, one copy for all layers that read it."""
        # The memory that a copy was made of may be freed, and another tensor lie there: a copy counts for as long as
        # the storage lives unchanged.
        storage = x_NTF.untyped_storage()
        key = x_NTF.data_ptr(), x_NTF.shape, x_NTF.stride()
        alive, version, copy = self._copies.get(key, (None, 0, x_NTF))
        if alive is None or alive() is not storage or version != _torch.version(x_NTF):
            copy = products.aligned(x_NTF.to(ROUNDED))
            self._copies[key] = ref(storage), _torch.version(x_NTF), copy
        return copy

    def stored(self, name: str, factor: Factor) -> HeldFactor:
        """Return the stored form of a factor that `rounded` returned and whose norm was taken."""
        if name in self._names and type(factor) is Dense and _is_wide(factor.grad_BP):
            return factor.grad_BP.to(ROUNDED)
        return factor

    def complete(self) -> None:
        """Drop the copies, so that each lives no longer than the factors that refer to it."""
        self._copies.clear()


def restored(held: HeldFactor) -> Factor:
    """Return the factor whose norm was taken, to the bit, from its stored form."""
    return Dense(held) if isinstance(held, Tensor) else held


def _is_wide(tensor: Tensor) -> bool:
    """Return whether a tensor of float32 has memory for every number: a copy of an expanded one would take more."""
    whole = tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    return tensor.dtype == torch.float32 and whole
