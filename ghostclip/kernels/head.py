"""The cross-entropy of an LM head (over a vocabulary) and its squared norms, in tiles of logits that are then dropped.

Losses take one pass over the tiles, gradients one more, in which each tile is formed again by the same product of the
same shape: what was measured of a gradient is what is added of it. A Gram matrix of the logits' gradients is additive
over tiles, ``G_s·G_t = Σ_tiles G_s[tile]·G_t[tile]``, and so is the square of the gradient itself,
``‖GᵀA‖² = Σ_tiles ‖G[tile]ᵀA‖²``: norms do not need the logits of a sample at once.

Shape letters: B samples, T positions, N rows of all samples, C samples of a chunk, R = C·T, I features of a hidden
state, V entries of the vocabulary, K of those in a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ghostclip.errors import DataError
from ghostclip.kernels.bounds import (
    UNSEEN_DRIFT,
    Bounded,
    Product,
    Unfinished,
    block_norms,
    dots,
    finished_one,
    formed_error,
    masses,
    position_norms,
    product_norms,
    root_of_squares,
    sum_of_squares,
    unit_roundoff,
    widened,
)
from ghostclip.kernels.gram import FEWEST_SEEN, WORKSPACE
from ghostclip.kernels.outer import weighted_sum

ROWS: Final = 1024
"""Positions that a tile has, where samples are short: thinner products are slower."""

TILE: Final = WORKSPACE // 4
"""Logits of a tile (float32: 4 MiB); some three tensors of that size are alive at a time."""

NARROWEST: Final = 64
"""Logits of a position in a tile, at least, however long a sample is."""


class Form(NamedTuple):
    """The function of the logits ``y = x·w + b``: ``z = cap·tanh(scale·y/cap)``, and a loss of z."""

    ignore_index: int = -100  # the label of positions that do not count
    smoothing: float = 0.0  # ε, as for ``torch.nn.functional.cross_entropy``
    cap: float | None = None  # what logits are softly capped at; None for no cap
    scale: float = 1.0  # factor of the logits
    z_loss: float = 0.0  # factor of ``lse²``, which is added to the loss


class Table(NamedTuple):
    """The head's parameters, and the form of its logits and loss."""

    weight_VI: Tensor
    bias_V: Tensor | None
    form: Form


class Tokens(NamedTuple):
    """Hidden states and labels of positions, with the gradients of their losses."""

    x_BTI: Tensor
    label_BT: Tensor
    lse_BT: Tensor  # log-sum-exp of every position's logits, from the forward
    grad_BT: Tensor  # gradient of every position's loss, float32 or float64

    def of(self, samples: slice) -> Tokens:
        """Return the positions of a few samples."""
        return Tokens(*(part[samples] for part in self))


class Tiling(NamedTuple):
    """How many samples a chunk has, and how many logits of each position a tile has."""

    samples: int  # of a chunk
    columns: int  # logits of a tile, of each position


def tiling(samples: int, positions: int, vocabulary: int) -> Tiling:
    """Split a head: chunks of about `ROWS` positions, and tiles of the vocabulary, of at most `TILE` logits."""
    # Sizes alone decide, so that both passes agree.
    at_once = max(1, min(samples, ROWS // max(1, positions)))
    widest = max(NARROWEST, TILE // max(1, at_once * positions))
    tiles = max(1, -(-vocabulary // widest))
    return Tiling(at_once, -(-vocabulary // tiles))


def columns_of(vocabulary: int, width: int) -> Iterator[slice]:
    """Yield the tiles of a vocabulary as slices, the last one perhaps narrower."""
    for start in range(0, vocabulary, max(1, width)):
        yield slice(start, min(start + width, vocabulary))


def product(left_RI: Tensor, right_IK: Tensor) -> Tensor:
    """Return a matrix product that is accumulated and returned in float32 at least."""
    if left_RI.is_cuda and left_RI.dtype.itemsize < 4:
        return torch.mm(left_RI, right_IK, out_dtype=torch.float32)
    return torch.mm(widened(left_RI), widened(right_IK))


def _scores(x_RI: Tensor, table: Table, columns: slice) -> tuple[Tensor, Tensor | None]:
    """Return a tile of z, ``(R, K)``, and of ``tanh(scale·y/cap)`` where there is a cap."""
    form, z_RK = table.form, product(x_RI, table.weight_VI[columns].mT)
    if table.bias_V is not None:
        z_RK += table.bias_V[columns]
    if form.cap is None:
        return (z_RK if form.scale == 1 else z_RK.mul_(form.scale)), None
    capped_RK = z_RK.mul_(form.scale / form.cap).tanh_()
    return capped_RK * form.cap, capped_RK


def losses(x_NI: Tensor, label_N: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """Return the loss of every position and the log-sum-exp of its logits, each ``(N,)``, float32 at least.

    Cost: 2·N·I·V.
    """
    plan = tiling(len(x_NI), 1, len(table.weight_VI))
    chunks = zip(x_NI.split(plan.samples), label_N.split(plan.samples), strict=True)
    parts = [_losses(x_RI, label_R, table, plan) for x_RI, label_R in chunks]
    loss_N, lse_N = (torch.cat(side) for side in zip(*parts, strict=True))
    return loss_N, lse_N


def _losses(x_RI: Tensor, label_R: Tensor, table: Table, plan: Tiling) -> tuple[Tensor, Tensor]:
    """Return the losses and log-sum-exps of a few positions, their logits formed tile by tile."""
    form, vocabulary = table.form, len(table.weight_VI)
    kind = torch.promote_types(x_RI.dtype, torch.float32)
    lse_R = torch.full(label_R.shape, -torch.inf, dtype=kind, device=x_RI.device)
    picked_R, sum_R = torch.zeros_like(lse_R), torch.zeros_like(lse_R)
    for columns in columns_of(vocabulary, plan.columns):
        z_RK, _ = _scores(x_RI, table, columns)
        lse_R = torch.logaddexp(lse_R, z_RK.logsumexp(1))
        place_R1, inside_R = _places(label_R, columns)
        picked_R += z_RK.gather(1, place_R1).squeeze(1).where(inside_R, 0.0)
        if form.smoothing:
            sum_R += z_RK.sum(1)
    loss_R = lse_R - (1 - form.smoothing) * picked_R
    if form.smoothing:
        loss_R -= sum_R * (form.smoothing / vocabulary)
    if form.z_loss:
        loss_R += form.z_loss * lse_R.square()
    return loss_R.masked_fill(label_R == form.ignore_index, 0.0), lse_R


def _places(label_R: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each label in a tile, ``(R, 1)``, and whether it is in the tile, ``(R,)``."""
    place_R = label_R - columns.start
    inside_R = (place_R >= 0) & (label_R < columns.stop)
    return place_R.where(inside_R, 0).unsqueeze(1), inside_R


def gradient_tiles(tokens: Tokens, table: Table, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the gradient of a chunk's logits in tiles ``(C, T, K)``, each valid until the next is requested.

    Cost: 2·C·T·I·V.
    """
    form, vocabulary = table.form, len(table.weight_VI)
    x_RI, label_R = tokens.x_BTI.flatten(0, 1), tokens.label_BT.flatten()
    weights = _weights(Tokens(x_RI, label_R, tokens.lse_BT.flatten(), tokens.grad_BT.flatten()), form)
    for tile in columns_of(vocabulary, columns):
        z_RK, capped_RK = _scores(x_RI, table, tile)
        p_RK = z_RK.sub_(weights.lse).exp_()
        if weights.share is not None:
            p_RK *= weights.share
        if form.smoothing:
            p_RK -= form.smoothing / vocabulary
        place_R1, inside_R = _places(label_R, tile)
        p_RK.scatter_add_(1, place_R1, (inside_R.to(p_RK.dtype) * (form.smoothing - 1)).unsqueeze(1))
        if capped_RK is not None:
            p_RK *= capped_RK.square_().neg_().add_(1)
        p_RK *= weights.grad
        yield tile, p_RK.view(*tokens.label_BT.shape, -1)


class _Weights(NamedTuple):
    """The values that all logits of a position share, each with a trailing axis of size 1."""

    lse: Tensor  # log-sum-exp; infinite where nothing depends on a position, whose logits may have any size
    share: Tensor | None  # factor of the probabilities; None for one
    grad: Tensor  # gradient of the loss, times the scale of the logits


def _weights(tokens: Tokens, form: Form) -> _Weights:
    """Return what the gradients of all logits of a position have in common."""
    counts = (tokens.grad_BT != 0) & (tokens.label_BT != form.ignore_index)
    share = (1 + 2 * form.z_loss * tokens.lse_BT).where(counts, 1.0).unsqueeze(-1) if form.z_loss else None
    lse = tokens.lse_BT.where(counts, torch.inf).unsqueeze(-1)
    return _Weights(lse, share, (tokens.grad_BT * form.scale).where(counts, 0.0).unsqueeze(-1))


class Collector(ABC):
    """Accumulates one result over the tiles of logit gradients of a chunk."""

    @abstractmethod
    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Add one tile's contribution; the tile must not be changed."""


class InputGradient(Collector):
    """The hidden states' gradient, ``Σ_v g_v·w_v``. Cost: 2·C·T·I·V."""

    def __init__(self, table: Table, out_CTI: Tensor) -> None:
        self._table, self._out_CTI = table, out_CTI
        kind = torch.promote_types(out_CTI.dtype, torch.float32)
        rows_RI = out_CTI.flatten(0, 1)
        # Added up in its place where its type is one that sums are kept in.
        self._sum_RI = rows_RI.zero_() if out_CTI.dtype == kind else torch.zeros_like(rows_RI, dtype=kind)

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Add a tile's share."""
        weight_KI = self._table.weight_VI[tile]
        if weight_KI.is_cuda and weight_KI.dtype.itemsize < 4:
            self._sum_RI += product(g_CTK.flatten(0, 1).to(weight_KI.dtype), weight_KI)
        else:
            self._sum_RI.addmm_(g_CTK.flatten(0, 1), widened(weight_KI))
        if tile.stop == len(self._table.weight_VI) and self._sum_RI.dtype != self._out_CTI.dtype:
            self._out_CTI.copy_(self._sum_RI.view_as(self._out_CTI))


class BiasGradients(Collector):
    """Every sample's gradient of the bias, ``Σ_t g_t``."""

    def __init__(self, out_CV: Tensor) -> None:
        self._out_CV = out_CV

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Set a tile's entries."""
        torch.sum(g_CTK, 1, out=self._out_CV[:, tile])


class WeightSum(Collector):
    """The weighted sum of the weight's gradients. Cost: 2·C·T·I·V."""

    def __init__(self, a_CTI: Tensor, coef_C: Tensor, out_VI: Tensor) -> None:
        self._a_CTI, self._coef_C, self._out_VI = a_CTI, coef_C, out_VI

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Add a tile's share."""
        weighted_sum(self._a_CTI, g_CTK, self._coef_C, self._out_VI[tile])


class RowsAt(Collector):
    """A few rows of every sample's gradient of a tied weight, ``Σ_t g[t, ids_u]·x_t``. Cost: 2·C·T·U·I."""

    def __init__(self, a_CTI: Tensor, ids_CU: Tensor, row_CUI: Tensor, mass_CU: Tensor) -> None:
        # ids_CU: rows of each sample. row_CUI: output, the rows. mass_CU: output, sums of their terms' norms.
        self._a_CTI, self._norm_CT = a_CTI, position_norms(a_CTI)
        self._ids_CU, self._order_CU = ids_CU.sort(dim=1)
        self._row_CUI, self._mass_CU = row_CUI, mass_CU

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Form the gradients of the wanted rows that lie in a tile."""
        if g_CTK.is_meta:
            # Which rows lie where is not known: all are counted with the first tile.
            if tile.start == 0:
                torch.bmm(g_CTK.new_empty(*g_CTK.shape[:2], self._ids_CU.shape[1]).mT, self._a_CTI)
            return
        edges = self._ids_CU.new_tensor([tile.start, tile.stop]).expand(len(self._ids_CU), 2).contiguous()
        for sample, (start, stop) in enumerate(torch.searchsorted(self._ids_CU, edges).tolist()):
            if start == stop:
                continue
            place_U = self._order_CU[sample, start:stop]
            g_TU = g_CTK[sample].index_select(1, self._ids_CU[sample, start:stop] - tile.start)
            self._row_CUI[sample, place_U] = g_TU.mT @ self._a_CTI[sample]
            self._mass_CU[sample, place_U] = self._norm_CT[sample] @ g_TU.abs_()


class HeadCall:
    """The state that one forward of the head shares with its backward and with the clipper."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.lse: Tensor | None = None  # log-sum-exp of every position's logits, once the forward has run
        # a gradient of the losses that arrived, and a function that returns the hidden states' gradient for it
        self.arrived: tuple[Tensor, Callable[[], Tensor]] | None = None

    def known_gradient(self, grad: Tensor) -> Tensor | None:
        """Return the hidden states' gradient where the clipper forms the same tiles anyway."""
        # None for another gradient.
        arrived, self.arrived = self.arrived, None
        if arrived is None or arrived[0].data_ptr() != grad.data_ptr() or arrived[0].shape != grad.shape:
            return None
        return arrived[1]()


def vocabulary_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: HeadCall) -> Tensor:
    """Return the loss of every position, shape ``L`` of the labels: one operation, which the clipper intercepts."""
    if has_torch_function_variadic(hidden, weight, bias):
        result: Tensor = handle_torch_function(
            vocabulary_losses, (hidden, weight, bias), hidden, weight, bias, labels, call
        )
        return result
    return _Losses.apply(hidden, weight, bias, labels, call)


class _Losses(torch.autograd.Function):
    """Autograd function of the losses of a vocabulary head, which stores no logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: HeadCall
    ) -> Tensor:
        """Compute losses by tiles, and keep the log-sum-exps for the backward."""
        features, table = hidden.shape[-1], Table(weight, bias, call.form)
        _require_labels(labels, len(weight), call.form)
        with _autocast_off(hidden.device):
            loss_N, lse_N = losses(hidden.reshape(-1, features), labels.reshape(-1), table)
        call.lse = lse_N.view(labels.shape)
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.call = call
        return loss_N.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, from the clipper where it forms the same tiles for the norms anyway."""
        hidden, weight, bias, labels = ctx.saved_tensors
        call, (grad,) = ctx.call, grads
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_grads: list[Tensor | None] = [None] * 5
        with _autocast_off(hidden.device):
            if needs_hidden and not (needs_weight or needs_bias):
                input_grads[0] = call.known_gradient(grad)
            if input_grads[0] is None:
                needs, table = (needs_hidden, needs_weight, needs_bias), Table(weight, bias, call.form)
                input_grads[:3] = _gradients(hidden, labels, table, (call.lse, grad), needs)
        return tuple(input_grads)


def _autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, which knows no device "meta"."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _require_labels(labels: Tensor, vocabulary: int, form: Form) -> None:
    """Refuse labels outside the vocabulary where that can be seen without waiting for a device."""
    if labels.device.type == "cpu":
        outside = ((labels < 0) | (labels >= vocabulary)) & (labels != form.ignore_index)
        if bool(outside.any()):
            value = int(labels[outside][0])
            raise DataError(
                f"a label is {value}; the head has {vocabulary} entries, 0 to {vocabulary - 1}. Mark positions that do "
                f"not count with ignore_index={form.ignore_index}."
            )


def _gradients(
    hidden: Tensor, labels: Tensor, table: Table, arrived: tuple[Tensor, Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of hidden states, weight and bias that are needed, summed over all positions."""
    x_N1I = hidden.reshape(-1, 1, hidden.shape[-1])
    tokens = Tokens(x_N1I, *(part.reshape(-1, 1) for part in (labels, *arrived)))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    out_N1I = hidden.new_empty(x_N1I.shape) if needs[0] else None
    out_VI = table.weight_VI.new_zeros(table.weight_VI.shape, dtype=wide) if needs[1] else None
    sum_V = hidden.new_zeros(len(table.weight_VI), dtype=wide) if needs[2] else None
    plan = tiling(len(x_N1I), 1, len(table.weight_VI))
    for start in range(0, len(x_N1I), plan.samples):
        chunk = tokens.of(slice(start, start + plan.samples))
        collectors: list[Collector] = []
        if out_N1I is not None:
            collectors.append(InputGradient(table, out_N1I[start : start + plan.samples]))
        if out_VI is not None:
            collectors.append(WeightSum(chunk.x_BTI, out_VI.new_ones(len(chunk.x_BTI)), out_VI))
        for tile, g_CTK in gradient_tiles(chunk, table, plan.columns):
            for collector in collectors:
                collector.add_tile(tile, g_CTK)
            if sum_V is not None:
                sum_V[tile] += g_CTK.sum((0, 1))
    return [
        None if out_N1I is None else out_N1I.view(hidden.shape),
        None if out_VI is None else out_VI.to(table.weight_VI.dtype),
        None if sum_V is None or table.bias_V is None else sum_V.to(table.bias_V.dtype),
    ]


LARGEST: Final = 4 * WORKSPACE
"""Entries of the largest Gram matrix that is held while tiles are added to it (float32: 64 MiB, at 4096 positions)."""

SUBTILE: Final = WORKSPACE // 4
"""Elements of gradients that are formed at a time."""


@lru_cache(maxsize=4096)
def bands(positions: int) -> tuple[slice, ...]:
    """Return slices of the rows of a symmetric matrix, each of which is formed up to its own diagonal block."""
    # More bands for longer sequences, up to 16: products thinner than 32 rows cost more than they save.
    count = max(1, min(16, positions // 32))
    height = -(-positions // count)
    return tuple(slice(start, min(start + height, positions)) for start in range(0, positions, height))


def norm_flops(positions: int, inputs: int, vocabulary: int) -> int:
    """Return the FLOPs of one sample's squared norm."""
    if positions <= 1:
        return 0
    return min(_gram_flops(positions, inputs, vocabulary), 2 * positions * inputs * vocabulary)


def prefers_gram(positions: int, inputs: int, vocabulary: int) -> bool:
    """Return whether the Gram matrix costs less than the gradient and fits `LARGEST`."""
    return _gram_flops(positions, inputs, vocabulary) < 2 * positions * inputs * vocabulary


def _gram_flops(positions: int, inputs: int, vocabulary: int) -> int:
    """Return the FLOPs of one sample's norm by a Gram matrix, more than anything else where it is too large."""
    if positions**2 > LARGEST:
        return 1 << 62
    return 2 * (inputs + vocabulary) * sum((band.stop - band.start) * band.stop for band in bands(positions))


def norms_of(a_CTI: Tensor, vocabulary: int) -> Norms:
    """Return the accumulator of a chunk's squared norms in the cheaper form."""
    if a_CTI.shape[1] <= 1:
        return _OnePosition(a_CTI, vocabulary)
    if prefers_gram(a_CTI.shape[1], a_CTI.shape[2], vocabulary):
        return _Gram(a_CTI, vocabulary)
    return _OfGradients(a_CTI, vocabulary)


class Norms(Collector):
    """Accumulator of squared norms over the tiles of one chunk, and of norms of positions, which every form needs."""

    def __init__(self, a_CTI: Tensor, vocabulary: int) -> None:
        self._a_CTI, self._sizes = a_CTI, (a_CTI.shape[2], vocabulary)
        self._a_CT = position_norms(a_CTI)  # norms of the positions' hidden states
        self._tiles: list[Tensor] = []  # norms of positions in each tile

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Store the norms of a tile's positions."""
        self._tiles.append(position_norms(g_CTK).flatten().unsqueeze(1))

    @abstractmethod
    def result(self) -> Bounded:
        """Return the squared norms once all tiles are in, each of shape ``(C,)``."""

    @property
    def _g_CT(self) -> Tensor:
        """The norms of the logit gradients of every position, over all tiles."""
        return root_of_squares(self._tiles).view_as(self._a_CT)


class _OnePosition(Norms):
    """Products of two norms: one position meets no other."""

    def result(self) -> Bounded:
        """Return the products of the two norms of the only position."""
        norms = product_norms([Product([self._a_CT], self._g_CT, self._sizes)])
        measured = masses(self._a_CT, self._g_CT, *self._sizes)
        value_C = sum_of_squares(norms)
        return Bounded(value_C, torch.zeros_like(value_C), measured.mass_N, measured.scale_N)


class _Gram(Norms):
    """``Σ_{s,t} (a_s·a_t)(g_s·g_t)``, the bands on and below the diagonal. Cost: `norm_flops`."""

    def __init__(self, a_CTI: Tensor, vocabulary: int) -> None:
        super().__init__(a_CTI, vocabulary)
        self._seen = a_CTI.dtype == torch.float32 and a_CTI.shape[1] >= FEWEST_SEEN
        samples, self._bands = a_CTI.shape[0], bands(a_CTI.shape[1])
        self._sums = [a_CTI.new_zeros(samples, band.stop - band.start, band.stop) for band in self._bands]

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Add a tile's dot products."""
        super().add_tile(tile, g_CTK)
        for band, sum_CRU in zip(self._bands, self._sums, strict=True):
            if self._seen:
                sum_CRU.baddbmm_(g_CTK[:, band], g_CTK[:, : band.stop].mT)
            else:
                sum_CRU.add_(dots(g_CTK[:, band], g_CTK[:, : band.stop]))

    def result(self) -> Bounded:
        """Return the squared norms: Gram matrices of hidden states times those of logit gradients, with bounds."""
        values, absolutes, squares = [], [], []
        for band, g_CRU in zip(self._bands, self._sums, strict=True):
            left_CRI, right_CUI = self._a_CTI[:, band], self._a_CTI[:, : band.stop]
            a_CRU = torch.bmm(left_CRI, right_CUI.mT) if self._seen else dots(left_CRI, right_CUI)
            if self._seen:
                squares.append(torch.stack([part.diagonal(band.start, 1, 2) for part in (a_CRU, g_CRU)]))
            # Entries before the diagonal block stand for those behind it as well.
            a_CRU[:, :, : band.start] *= 2
            entry_CE = a_CRU.mul_(g_CRU).flatten(1)
            values.append(entry_CE.sum(1))
            absolutes.append(entry_CE.abs_().sum(1))
        value_C, absolute_C = (torch.stack(parts).sum(0) for parts in (values, absolutes))
        square_KCT = torch.cat(squares, 2) if squares else None
        unseen = None if self._seen else UNSEEN_DRIFT * unit_roundoff(value_C.dtype)
        return finished_one(Unfinished(value_C, self._a_CT, self._g_CT, self._sizes, absolute_C, square_KCT, unseen))


class _OfGradients(Norms):
    """Gradients formed a few entries of the vocabulary at a time, squared and dropped. Cost: 2·T·I·V per sample."""

    def __init__(self, a_CTI: Tensor, vocabulary: int) -> None:
        super().__init__(a_CTI, vocabulary)
        self._norms: list[Tensor] = []  # norms of parts of the gradients
        self._width = max(16, SUBTILE // max(1, a_CTI.shape[0] * a_CTI.shape[2]))

    def add_tile(self, tile: slice, g_CTK: Tensor) -> None:
        """Form a tile's gradients."""
        super().add_tile(tile, g_CTK)
        for part_CTK in g_CTK.split(self._width, 2):
            grad_CKI = torch.bmm(part_CTK.mT, self._a_CTI)
            self._norms += [root_of_squares(block_norms(grad_CKI.flatten(1))).unsqueeze(1)]

    def result(self) -> Bounded:
        """Return the squared norms added up over the tiles."""
        value_C = sum_of_squares(self._norms)
        measured = masses(self._a_CT, self._g_CT, *self._sizes)
        return Bounded(value_C, formed_error(value_C, measured), measured.mass_N, measured.scale_N)
