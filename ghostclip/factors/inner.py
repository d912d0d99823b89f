"""Per-sample inner products between two factors of the same parameter.

They are the cross terms of a shared parameter: ``‖Σ_k f_k‖² = Σ_k ‖f_k‖² + 2 Σ_{j<k} ⟨f_j, f_k⟩``.

Shape letters: B samples, T and U positions, I inputs, O outputs, V rows, ``*P`` the parameter's own shape.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ghostclip.factors import planner
from ghostclip.factors.base import Factor, dot_products, to_accumulation
from ghostclip.factors.contraction import contraction
from ghostclip.factors.dense import Dense
from ghostclip.factors.outer import Outer
from ghostclip.factors.permuted import Permuted
from ghostclip.factors.placed import Placed
from ghostclip.factors.rows import Rows
from ghostclip.factors.stacked import Stacked, sum_tensors
from ghostclip.factors.windows import Windows


def inner(first: Factor, second: Factor) -> Tensor:
    """Return ``⟨first_b, second_b⟩`` for every sample.

    Args:
        first: A factor of some parameter.
        second: A factor of the same parameter and batch.

    Returns:
        Inner products, shape ``(B,)``, float32 or float64.
    """
    for (kind, other), pair in _PAIRS.items():
        if isinstance(first, kind) and isinstance(second, other) and _same_form(first, second):
            return pair(first, second)
        if isinstance(second, kind) and isinstance(first, other) and _same_form(first, second):
            return pair(second, first)
    flat = (first.materialize().reshape(first.batch_size, -1), second.materialize().reshape(first.batch_size, -1))
    return dot_products(*flat)


def _same_form(first: Factor, second: Factor) -> bool:
    """Return whether both see the parameter as the same matrices: other forms have no cheap product."""
    forms = [_form(factor) for factor in (first, second)]
    return None in forms or forms[0] == forms[1]


def _form(factor: Factor) -> tuple[int, int, int] | None:
    if isinstance(factor, Outer):
        return factor.slots, factor.sizes[2], factor.sizes[1]
    return (1, *factor.matrix) if isinstance(factor, Rows) else None


def _placed_placed(first: Placed, second: Placed) -> Tensor:
    if first.index == second.index:
        return inner(first.inner, second.inner)
    return inner(Dense(first.materialize()), Dense(second.materialize()))


def _permuted_permuted(first: Permuted, second: Permuted) -> Tensor:
    if first.order == second.order:
        return inner(first.inner, second.inner)
    return inner(Dense(first.materialize()), Dense(second.materialize()))


def _stacked_stacked(first: Stacked, second: Stacked) -> Tensor:
    common = [number for number in first.parts if number in second.parts]
    if not common:
        return torch.zeros_like(first.sqnorm().value_B)
    return sum_tensors([inner(first.parts[number], second.parts[number]) for number in common])


def _outer_outer(first: Outer, second: Outer) -> Tensor:
    positions, inputs, outputs = first.sizes
    other = second.sizes[0]
    if positions * other * (inputs + outputs) > (positions + other) * inputs * outputs:
        products = (first.materialize().flatten(1), second.materialize().flatten(1))
        return dot_products(*products)
    first, second = (factor.unfolded() if isinstance(factor, Windows) else factor for factor in (first, second))
    a_NUI, g_NUO = to_accumulation(second.a_NTI), to_accumulation(second.g_NTO)
    total_N = a_NUI.new_zeros(a_NUI.shape[0])
    rows = planner.block_rows(positions, max(1, a_NUI.shape[0] * other // max(1, positions)))
    for start in range(0, positions, rows):
        piece = slice(start, start + rows)
        product = torch.bmm(to_accumulation(first.a_NTI[:, piece]), a_NUI.mT)
        product *= torch.bmm(to_accumulation(first.g_NTO[:, piece]), g_NUO.mT)
        total_N += product.sum((1, 2))
    return total_N if first.slots == 1 else total_N.view(-1, first.slots).sum(1)


def _outer_rows(outer: Outer, rows: Rows) -> Tensor:
    """Return ``Σ_{t,u} ⟨a_t, r_u⟩ · g_t[ids_u]``: the embedding-to-head cross term without a V×I tensor."""
    outer = outer.reshaped(rows.matrix)
    a_BTI, r_BUI = to_accumulation(outer.a_NTI), to_accumulation(rows.g_BTI)
    total_B = a_BTI.new_zeros(rows.batch_size)
    block = planner.block_rows(a_BTI.shape[1], rows.batch_size)
    for start in range(0, a_BTI.shape[1], block):
        piece = slice(start, start + block)
        g_BTV = to_accumulation(outer.g_NTO[:, piece])
        picked_BTU = g_BTV.gather(2, rows.ids_BT.unsqueeze(1).expand(-1, g_BTV.shape[1], -1))
        total_B += contraction("bti,bui,btu->b", a_BTI[:, piece], r_BUI, picked_BTU)
    return total_B


def _rows_rows(first: Rows, second: Rows) -> Tensor:
    pairs_1, sums_1 = first.segments()
    pairs_2, sums_2 = second.segments()
    place = torch.searchsorted(pairs_2, pairs_1).clamp(max=max(pairs_2.numel() - 1, 0))
    total_B = sums_1.new_zeros(first.batch_size)
    if pairs_1.numel() == 0 or pairs_2.numel() == 0:
        return total_B
    products = torch.linalg.vecdot(sums_1, sums_2[place]) * (pairs_2[place] == pairs_1)
    return total_B.index_add_(0, pairs_1 // first.matrix[0], products)


def _dense_rows(dense: Dense, rows: Rows) -> Tensor:
    index = rows.ids_BT.unsqueeze(-1).expand(-1, -1, rows.matrix[1])
    picked_BTI = dense.grad_BP.reshape(dense.batch_size, *rows.matrix).gather(1, index)
    return (picked_BTI * to_accumulation(rows.g_BTI)).sum((1, 2))


_PAIRS: Final[dict[tuple[type[Factor], type[Factor]], Callable[..., Tensor]]] = {
    (Placed, Placed): _placed_placed,
    (Permuted, Permuted): _permuted_permuted,
    (Stacked, Stacked): _stacked_stacked,
    (Outer, Outer): _outer_outer,
    (Outer, Rows): _outer_rows,
    (Rows, Rows): _rows_rows,
    (Dense, Rows): _dense_rows,
}
