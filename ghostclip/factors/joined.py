"""Several uses of one parameter as one factor: a cell called at every step, a layer shared between many blocks.

The norm of a sum of n factors has n·(n-1)/2 cross terms. Factors of one form need none: positions of outer products
(and looked-up rows) simply stand one after the other, and tensors add up.

Shape letters: N samples times slots, T positions, B samples, K rows of a sample, C channels.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from ghostclip.factors.base import Factor
from ghostclip.factors.dense import Dense
from ghostclip.factors.outer import Outer
from ghostclip.factors.permuted import Permuted
from ghostclip.factors.rows import Rows
from ghostclip.factors.stacked import sum_tensors
from ghostclip.factors.windows import Windows

# Two uses of a large layer have one cross term, which costs less memory than their positions side by side.
_FEW: Final = 3


def joined(factors: Sequence[Factor]) -> list[Factor]:
    """Return fewer factors with the same sum: one for each form, concatenated in a copy."""
    groups: dict[Any, list[Factor]] = {}
    for factor in factors:
        groups.setdefault(_form(factor), []).append(factor)
    return [part for group in groups.values() for part in _as_one(group)]


def _form(factor: Factor) -> Any:
    if isinstance(factor, Windows):
        sides = (factor.x_BKC, factor.g_BKO)
        return Windows, factor.shape, factor.geometry, *((side.shape[2:], side.dtype) for side in sides)
    if isinstance(factor, Outer):
        return Outer, factor.shape, factor.slots, factor.sizes[1:], factor.a_NTI.dtype, factor.g_NTO.dtype
    if isinstance(factor, Rows):
        return Rows, factor.shape, factor.matrix, factor.g_BTI.dtype
    if isinstance(factor, Permuted) and type(factor.inner) is Dense:
        return Permuted, factor.order, _form(factor.inner)
    return (Dense, factor.shape, factor.grad_BP.dtype) if type(factor) is Dense else id(factor)


def _as_one(group: list[Factor]) -> Sequence[Factor]:
    first = group[0]
    if isinstance(first, Permuted):
        inner = [factor.inner for factor in group if isinstance(factor, Permuted)]
        return [Permuted(part, first.order) for part in _as_one(inner)]
    if len(group) < (2 if isinstance(first, Dense) else _FEW):
        return group
    if isinstance(first, Dense):
        return [Dense(sum_tensors([factor.grad_BP for factor in group if isinstance(factor, Dense)]))]
    if isinstance(first, Windows):
        convolved = [factor for factor in group if isinstance(factor, Windows)]
        x_BKC, g_BKO = (torch.cat(sides, 1) for sides in zip(*((f.x_BKC, f.g_BKO) for f in convolved), strict=True))
        return [Windows(x_BKC, g_BKO, first.geometry, shape=first.shape)]
    if isinstance(first, Outer):
        # A backward meets the last step of a sequence first.
        outers = [factor for factor in reversed(group) if isinstance(factor, Outer)]
        a_NTI, g_NTO = torch.cat([outer.a_NTI for outer in outers], 1), torch.cat([outer.g_NTO for outer in outers], 1)
        return [Outer(a_NTI, g_NTO, shape=first.shape, slots=first.slots)]
    rows = [factor for factor in group if isinstance(factor, Rows)]
    ids_BT, g_BTI = torch.cat([factor.ids_BT for factor in rows], 1), torch.cat([factor.g_BTI for factor in rows], 1)
    return [Rows(ids_BT, g_BTI, shape=first.shape)]
