"""Several factors of one parameter: joined into fewer, and the inner products between those that stay.

The norm of a sum has a cross term for each pair: ``‖Σ_k f_k‖² = Σ_k ‖f_k‖² + 2 Σ_{j<k} ⟨f_j, f_k⟩``. Factors of one
form need none: positions of outer products (and looked-up rows) simply stand one after the other, and tensors add up.

Shape letters: B samples, N samples times slots, T and U positions, I inputs, O outputs, V rows, K rows of a sample, C
channels, ``*P`` the parameter's own shape.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ghostclip.factors.base import Dense, Factor, to_accumulation
from ghostclip.factors.convolution import Windows
from ghostclip.factors.head import Head
from ghostclip.factors.outer import Outer, block_rows
from ghostclip.factors.rows import Rows
from ghostclip.factors.wrapped import AtIndex, Permuted, Stacked, sum_tensors
from ghostclip.kernels.bounds import dots
from ghostclip.kernels.sums import add_rows_


class InnerProducts(NamedTuple):
    """Inner products of the gradients that two factors stand for."""

    value_B: Tensor  # ``⟨first_b, second_b⟩``
    absolute_B: Tensor  # sum of the absolute values of the products, of which rounding is a share


def inner(first: Factor, second: Factor) -> InnerProducts:
    """Return ``⟨first_b, second_b⟩`` for every sample, of two factors of one parameter and batch."""
    for (kind, other), pair in _PAIRS.items():
        if isinstance(first, kind) and isinstance(second, other) and _same_form(first, second):
            return pair(first, second)
        if isinstance(second, kind) and isinstance(first, other) and _same_form(first, second):
            return pair(second, first)
    return _dots(first.materialize().reshape(first.batch_size, -1), second.materialize().reshape(first.batch_size, -1))


def _dots(first_BP: Tensor, second_BP: Tensor) -> InnerProducts:
    """Return inner products of gradients ``(B, P)``."""
    return _added(first_BP * second_BP)


def _added(products_BP: Tensor) -> InnerProducts:
    """Return the sum of products, pairwise and in place."""
    # A BLAS dot product of a million float32 values drifts by 1e-3.
    value_B = products_BP.sum(1)
    return InnerProducts(value_B, products_BP.abs_().sum(1))


def _sum(parts: Sequence[InnerProducts]) -> InnerProducts:
    """Return the sum of inner products over parts."""
    return InnerProducts(*(sum_tensors(list(part)) for part in zip(*parts, strict=True)))


def _same_form(first: Factor, second: Factor) -> bool:
    """Return whether both see the parameter as the same matrices: other forms have no cheap product."""
    forms = [_form(factor) for factor in (first, second)]
    return None in forms or forms[0] == forms[1]


def _form(factor: Factor) -> tuple[int, int, int] | None:
    """Return the (slots, rows, columns) that a factor sees the parameter as; None for other factors."""
    if isinstance(factor, Outer):
        return factor.slots, factor.sizes[2], factor.sizes[1]
    return (1, *factor.matrix) if isinstance(factor, Rows) else None


def _moved_moved(first: AtIndex | Permuted, second: AtIndex | Permuted) -> InnerProducts:
    """Inner products of two slices, or two permutations, of the parameter."""
    moves = [factor.index if isinstance(factor, AtIndex) else factor.order for factor in (first, second)]
    if moves[0] == moves[1]:
        return inner(first.inner, second.inner)
    return inner(Dense(first.materialize()), Dense(second.materialize()))


def _stacked_stacked(first: Stacked, second: Stacked) -> InnerProducts:
    """Inner products of two stacks: those of the slices that both have."""
    common = [number for number in first.parts if number in second.parts]
    if not common:
        return InnerProducts(first.zero_B, first.zero_B)
    return _sum([inner(first.parts[number], second.parts[number]) for number in common])


def _outer_outer(first: Outer, second: Outer) -> InnerProducts:
    """Inner products of two sums of outer products, by Gram blocks or by formed gradients, whichever is cheaper."""
    positions, inputs, outputs = first.sizes
    other = second.sizes[0]
    if positions * other * (inputs + outputs) > (positions + other) * inputs * outputs:
        return _dots(first.materialize().flatten(1), second.materialize().flatten(1))
    first, second = (factor.unfolded() if isinstance(factor, Windows) else factor for factor in (first, second))
    a_NUI, g_NUO = to_accumulation(second.a_NTI), to_accumulation(second.g_NTO)
    rows = block_rows(positions, max(1, a_NUI.shape[0] * other // max(1, positions)), a_NUI.device)
    parts = []
    for start in range(0, max(1, positions), rows):
        piece = slice(start, start + rows)
        product = dots(to_accumulation(first.a_NTI[:, piece]), a_NUI)
        product *= dots(to_accumulation(first.g_NTO[:, piece]), g_NUO)
        parts.append(_added(product.flatten(1)))
    total = _sum(parts)
    if first.slots == 1:
        return total
    return InnerProducts(*(part_N.view(-1, first.slots).sum(1) for part_N in total))


def _outer_rows(outer: Outer, rows: Rows) -> InnerProducts:
    """Return ``Σ_{t,u} ⟨a_t, r_u⟩ · g_t[ids_u]``: the embedding-to-head cross term without a V×I tensor."""
    outer = outer.reshaped(rows.matrix)
    a_BTI, r_BUI = to_accumulation(outer.a_NTI), to_accumulation(rows.g_BTI)
    block = block_rows(a_BTI.shape[1], rows.batch_size, a_BTI.device)
    parts = []
    for start in range(0, max(1, a_BTI.shape[1]), block):
        piece = slice(start, start + block)
        g_BTV = to_accumulation(outer.g_NTO[:, piece])
        product_BTU = dots(a_BTI[:, piece], r_BUI)
        product_BTU *= g_BTV.gather(2, rows.ids_BT.unsqueeze(1).expand(-1, g_BTV.shape[1], -1))
        parts.append(_added(product_BTU.flatten(1)))
    return _sum(parts)


def _head_rows(head: Head, rows: Rows) -> InnerProducts:
    """Return ``Σ_u ⟨r_u, row ids_u of the head's gradient⟩``, of rows at the sample's own tokens alone."""
    row_BUI, mass_BU = head.rows_at(rows.ids_BT)
    r_BUI = to_accumulation(rows.g_BTI).to(head.dtype)
    norm_BU = torch.linalg.vector_norm(r_BUI, dim=2)
    return InnerProducts((row_BUI * r_BUI).flatten(1).sum(1), (norm_BU * mass_BU).sum(1))


def _rows_rows(first: Rows, second: Rows) -> InnerProducts:
    """Inner products of two look-ups of one table: those of the rows that both have."""
    pairs_1, sums_1 = first.segments()
    pairs_2, sums_2 = second.segments()
    index = torch.searchsorted(pairs_2, pairs_1).clamp(max=max(pairs_2.numel() - 1, 0))
    zero_B = sums_1.new_zeros(first.batch_size)
    if pairs_1.numel() == 0 or pairs_2.numel() == 0:
        return InnerProducts(zero_B, zero_B)
    met_K1 = (pairs_2[index] == pairs_1).unsqueeze(1)
    products = _added(sums_1 * sums_2[index] * met_K1)
    # What belongs to no sample has no gradient.
    sample_K = (pairs_1 // first.matrix[0]).clamp(max=first.batch_size - 1)
    return InnerProducts(*(add_rows_(zero_B.clone(), sample_K, part_K) for part_K in products))


def _dense_rows(dense: Dense, rows: Rows) -> InnerProducts:
    """Inner products of formed gradients with rows of a table."""
    index = rows.ids_BT.unsqueeze(-1).expand(-1, -1, rows.matrix[1])
    picked_BTI = dense.grad_BP.reshape(dense.batch_size, *rows.matrix).gather(1, index)
    return _added((picked_BTI * to_accumulation(rows.g_BTI)).flatten(1))


_PAIRS: Final[dict[tuple[type[Factor], type[Factor]], Callable[..., InnerProducts]]] = {
    (AtIndex, AtIndex): _moved_moved,
    (Permuted, Permuted): _moved_moved,
    (Stacked, Stacked): _stacked_stacked,
    (Outer, Outer): _outer_outer,
    (Outer, Rows): _outer_rows,
    (Head, Rows): _head_rows,
    (Rows, Rows): _rows_rows,
    (Dense, Rows): _dense_rows,
}


# Two uses of a large layer have one cross term, which costs less memory than their positions side by side.
_FEW: Final = 3


def joined(factors: Sequence[Factor]) -> list[Factor]:
    """Return fewer factors with the same sum: one for each form, concatenated in a copy."""
    groups: dict[Any, list[Factor]] = {}
    for factor in factors:
        groups.setdefault(_joinable(factor), []).append(factor)
    return [part for group in groups.values() for part in _as_one(group)]


def _joinable(factor: Factor) -> Any:
    """Return a key that is equal for factors which can be concatenated."""
    if isinstance(factor, Windows):
        sides = (factor.x_BKC, factor.g_BKO)
        return Windows, factor.shape, factor.geometry, *((side.shape[2:], side.dtype) for side in sides)
    if isinstance(factor, Outer):
        return Outer, factor.shape, factor.slots, factor.sizes[1:], factor.a_NTI.dtype, factor.g_NTO.dtype
    if isinstance(factor, Rows):
        return Rows, factor.shape, factor.matrix, factor.g_BTI.dtype
    if isinstance(factor, Permuted) and type(factor.inner) is Dense:
        return Permuted, factor.order, _joinable(factor.inner)
    return (Dense, factor.shape, factor.grad_BP.dtype) if type(factor) is Dense else id(factor)


def _as_one(group: list[Factor]) -> Sequence[Factor]:
    """Return factors of one key concatenated along positions, or as they are if too few."""
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
