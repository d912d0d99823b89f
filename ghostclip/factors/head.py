"""Per-sample gradients of a vocabulary head whose logits are never held: outer products formed tile by tile.

Shape letters: B samples, D of those that are meant, C of a chunk, T and U positions, I features of a hidden state, V
entries of the vocabulary, K of those in a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.errors import TamperedGradientError, UnsupportedModelError
from ghostclip.factors.base import Dense, Factor, SquaredNorm, Terms, accumulation_dtype, no_error, zero_dropped
from ghostclip.kernels.bounds import Bounded
from ghostclip.kernels.head import (
    BiasGradients,
    Collector,
    InputGradient,
    Norms,
    RowsAt,
    Table,
    Tiling,
    Tokens,
    WeightSum,
    gradient_tiles,
    norm_flops,
    norms_of,
    tiling,
)

LARGEST: Final = 1 << 26
"""Elements of the per-sample gradients of several samples that are still formed (float32: 256 MiB)."""

REMEDY: Final = (
    "Use strategy='bookkeeping' or 'ghost', which never form them, or compute the logits by F.linear and the loss from "
    "them."
)


class _Rows(NamedTuple):
    """Rows of every sample's gradient at given token ids, with the sums of their terms' norms."""

    ids_BU: Tensor  # U token ids of each sample
    row_BUI: Tensor  # the gradient's rows at these ids
    mass_BU: Tensor  # sums of the norms of each row's terms


@dataclass(eq=False)
class Shared:
    """State that all factors of one gradient that arrived at a head share; None until it is known."""

    wants_input: bool  # whether the gradient of the hidden states is wanted
    wants_bias: bool  # whether that of the bias is
    norms: Bounded | None = None  # squared norms of the weight's gradients
    input_BTI: Tensor | None = None  # gradient of the hidden states
    bias_BV: Tensor | None = None  # per-sample gradients of the bias
    # rows of the weight that the same forward looked up, whose gradients its norms will ask for
    met: list[Tensor] = field(default_factory=list)
    rows: list[_Rows] = field(default_factory=list)  # gradients of looked-up rows
    summed: bool = False  # whether a clipped sum was asked for: no norm is asked for after that
    versions: list[int] = field(default_factory=list)  # versions of weight and bias, which count changes in place


class _Sum(NamedTuple):
    """Target of a clipped sum."""

    coef_D: Tensor
    out_VI: Tensor


class _Chunk(NamedTuple):
    """Samples of one chunk of tiles, and which of them are selected."""

    samples: slice
    inside: Tensor | None  # numbers of the selected ones in the chunk; None for all
    places: slice | Tensor  # their places among the selected samples


class Head(Factor):
    """The gradient of sample b is ``Σ_t g[b,t] ⊗ x[b,t]``, ``g[b,t]`` the gradient of the logits of a position."""

    # The g are formed again for every use, in the same tiles by the same products, so that all uses see the same
    # numbers.
    def __init__(
        self, tokens: Tokens, table: Table, shared: Shared, *, index_D: Tensor | None = None, double: bool = False
    ) -> None:
        """Hold tokens, weight table and shared state; `index_D` selects samples, `double` measures in float64."""
        # index_D: selected samples, None for all; tiles are formed of the whole batch in any case. `double`: norms and
        # sums are formed in float64, of the same tiles.
        self.x_BTI, self.label_BT, self.lse_BT, self.grad_BT = tokens
        self.index_D, self.double = index_D, double
        self.shape = table.weight_VI.shape
        self.batch_size = len(self.x_BTI) if index_D is None else len(index_D)
        self.table, self._shared = table, shared
        if not shared.versions:
            shared.versions = self._versions()

    @property
    def tokens(self) -> Tokens:
        """Hidden states, labels and gradients that tiles are formed of."""
        return Tokens(self.x_BTI, self.label_BT, self.lse_BT, self.grad_BT)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, I and V."""
        return self.x_BTI.shape[1], self.shape[1], self.shape[0]

    def expect(self, met: Sequence[Tensor]) -> None:
        """Form the rows at these ids along with the norms: an embedding tied to the head will need them."""
        # They will be asked for.
        expected: list[Tensor] = self._shared.met
        for ids_BU in met:
            fits = ids_BU.dim() == 2 and len(ids_BU) == len(self.x_BTI)
            if fits and not any(_is_same(ids_BU, known) for known in expected):
                expected.append(ids_BU)

    def norm_flops(self) -> int:
        """Return the FLOPs of one sample's squared norm without its tiles."""
        return norm_flops(*self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that norms and sums are formed in."""
        return torch.float64 if self.double else accumulation_dtype(self.x_BTI.dtype)

    @property
    def _plan(self) -> Tiling:
        """How the logits are divided into tiles: samples and vocabulary columns at a time."""
        samples, positions = self.label_BT.shape
        return tiling(samples, positions, self.shape[0])

    def _versions(self) -> list[int]:
        """Return the versions of weight and bias, which count changes in place."""
        return _torch.versions([part for part in self.table[:2] if isinstance(part, Tensor)])

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield the batch a few samples at a time, with the selected ones among them."""
        at_once = self._plan.samples
        for start in range(0, len(self.x_BTI), at_once):
            samples = slice(start, start + at_once)
            if self.index_D is None:
                yield _Chunk(samples, None, samples)
                continue
            indices = ((self.index_D >= start) & (self.index_D < start + at_once)).nonzero().squeeze(1)
            if len(indices):
                yield _Chunk(samples, (self.index_D[indices] - start).to(self.x_BTI.device), indices)

    def tiles(self, chunk: _Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the vocabulary and gradients of their logits, ``(C, T, K)``, of a chunk's samples."""
        # Refuses a weight or bias that was changed in place, or whose memory was freed, since the gradient arrived.
        if self._versions() != self._shared.versions:
            message = "the weight of a vocabulary head was changed in place between its norm and its clipped sum."
            raise TamperedGradientError(message)
        _require_memory(self.table.weight_VI)
        for tile, g_CTK in gradient_tiles(self.tokens.of(chunk.samples), self.table, self._plan.columns):
            yield tile, (g_CTK if chunk.inside is None else g_CTK[chunk.inside]).to(self.dtype)

    def inputs(self, chunk: _Chunk) -> Tensor:
        """Return a chunk's hidden states in `dtype`, shape ``(C, T, I)``."""
        x_CTI = self.x_BTI[chunk.samples]
        return (x_CTI if chunk.inside is None else x_CTI[chunk.inside]).to(self.dtype)

    def _sweep(self, *, norms: bool = False, into: _Sum | None = None) -> Bounded | None:
        """Form every tile of logit gradients once, for all that is wanted and unknown; return norms if asked for."""
        shared, whole = self._shared, self.index_D is None and not self.double
        input_BTI = torch.empty_like(self.x_BTI) if whole and shared.wants_input and shared.input_BTI is None else None
        bias_BV = None
        if whole and shared.wants_bias and shared.bias_BV is None:
            bias_BV = self.x_BTI.new_empty(len(self.x_BTI), self.shape[0], dtype=self.dtype)
        rows = [self._no_rows(ids_BU) for ids_BU in shared.met] if norms and whole else []
        chunk_norms: list[tuple[_Chunk, Norms]] = []
        for chunk in self._chunks():
            collectors: list[Collector] = []
            a_CTI = self.inputs(chunk)
            if input_BTI is not None:
                collectors.append(InputGradient(self.table, input_BTI[chunk.samples]))
            if bias_BV is not None:
                collectors.append(BiasGradients(bias_BV[chunk.samples]))
            collectors += [RowsAt(a_CTI, *(part[chunk.samples] for part in parts)) for parts in rows]
            if into is not None:
                collectors.append(WeightSum(a_CTI, into.coef_D[chunk.places], into.out_VI))
            if norms:
                chunk_norms.append((chunk, norms_of(a_CTI, self.shape[0])))
                collectors.append(chunk_norms[-1][1])
            for tile, g_CTK in self.tiles(chunk):
                for collector in collectors:
                    collector.add_tile(tile, g_CTK)
        shared.input_BTI = shared.input_BTI if input_BTI is None else input_BTI
        shared.bias_BV = shared.bias_BV if bias_BV is None else bias_BV
        shared.rows, shared.met = shared.rows + rows, [] if rows else shared.met
        return self._in_order(chunk_norms) if norms else None

    def _in_order(self, chunks: Sequence[tuple[_Chunk, Norms]]) -> Bounded:
        """Return the norms of chunks in the order of the selected samples."""
        if self.index_D is None and chunks:
            return Bounded(*(torch.cat(parts) for parts in zip(*(norms.result() for _, norms in chunks), strict=True)))
        total = Bounded(*(self.x_BTI.new_zeros(4, self.batch_size, dtype=self.dtype).unbind()))
        for chunk, norms in chunks:
            for whole_D, part_C in zip(total, norms.result(), strict=True):
                whole_D[chunk.places] = part_C.to(whole_D)
        return total

    def sqnorm(self) -> SquaredNorm:
        """Return squared norms, from a Gram matrix or from gradients formed and dropped, whichever is cheaper.

        Cost: 2·T·I·V per sample for the logits, as much for the hidden states' gradient from the same tiles, and
        `ghostclip.kernels.head.norm_flops`.
        """
        if not self.x_BTI.numel() or not self.batch_size:
            return no_error(self.x_BTI.new_zeros(self.batch_size, dtype=self.dtype))
        whole = self.index_D is None and not self.double
        bounded = self._shared.norms if whole else None
        if bounded is None:
            bounded = self._sweep(norms=True)
        assert bounded is not None
        if whole:
            self._shared.norms = bounded
        error_B = None if self.x_BTI.shape[1] == 1 else bounded.error_N
        return SquaredNorm(bounded.value_N.clamp(min=0), error_B, self._terms(bounded))

    def terms(self) -> Terms | None:
        """Return the positions' outer products; None where there is one position, which is added as it is."""
        return self.sqnorm().terms

    def _terms(self, bounded: Bounded) -> Terms | None:
        """Return the masses of the positions' terms; None for one position."""
        return None if self.x_BTI.shape[1] <= 1 else Terms(bounded.mass_N, bounded.scale_N, self.x_BTI.shape[1])

    def input_gradient(self) -> Tensor:
        """Return the gradient of the hidden states, ``(B, T, I)``, formed with norms that are still missing."""
        shared = self._shared
        if shared.input_BTI is None:
            norms = self._sweep(norms=not shared.summed and self.x_BTI.numel() > 0)
            shared.norms = norms if shared.norms is None else shared.norms
        input_BTI, shared.input_BTI, shared.wants_input = shared.input_BTI, None, False
        assert input_BTI is not None
        return input_BTI

    def bias_gradients(self) -> Tensor:
        """Return every sample's gradient of the bias, shape ``(B, V)``, formed with whatever else is wanted."""
        if self._shared.bias_BV is None:
            norms = self._sweep(norms=not self._shared.summed and self.x_BTI.numel() > 0)
            self._shared.norms = norms if self._shared.norms is None else self._shared.norms
        assert self._shared.bias_BV is not None
        return self._shared.bias_BV

    def rows_at(self, ids_BU: Tensor) -> tuple[Tensor, Tensor]:
        """Return a few rows of every gradient, ``(B, U, I)``, and the sums of their terms' norms, ``(B, U)``.

        Cost: 2·T·U·I per sample where they were expected (`expect`), as tiles of the norms serve them too; else 2·T·I·V
        more.
        """
        if self.index_D is None and not self.double:
            for known in self._shared.rows:
                if _is_same(known.ids_BU, ids_BU):
                    return known.row_BUI, known.mass_BU
        _, row_BUI, mass_BU = self._no_rows(ids_BU)
        for chunk in self._chunks():
            # A slice is written through, what an index picks is not.
            index = chunk.places
            rows, masses = row_BUI[index], mass_BU[index]
            picked = RowsAt(self.inputs(chunk), ids_BU[index], rows, masses)
            for tile, g_CTK in self.tiles(chunk):
                picked.add_tile(tile, g_CTK)
            row_BUI[index], mass_BU[index] = rows, masses
        return row_BUI, mass_BU

    def _no_rows(self, ids_BU: Tensor) -> _Rows:
        """Return zeros for the rows of every sample's gradient at these ids."""
        row_BUI = self.x_BTI.new_zeros(*ids_BU.shape, self.shape[1], dtype=self.dtype)
        return _Rows(ids_BU, row_BUI, row_BUI.new_zeros(ids_BU.shape))

    def materialize(self) -> Tensor:
        """Return the per-sample gradients ``(B, V, I)``; refuse several samples with more than `LARGEST` elements."""
        features = self.shape[1]
        if self.batch_size > 1 and self.batch_size * self.shape[0] * features > LARGEST:
            raise UnsupportedModelError(
                f"a vocabulary head of {self.shape[0]} x {features} without logits: the gradients of "
                f"{self.batch_size} samples would be formed one by one, which strategy='hooks' asks for, and a second "
                f"use of its weight that is no embedding's. {REMEDY}"
            )
        grad_DVI = self.x_BTI.new_empty(self.batch_size, *self.shape, dtype=self.dtype)
        for chunk in self._chunks():
            a_CTI = self.inputs(chunk)
            for tile, g_CTK in self.tiles(chunk):
                grad_DVI[chunk.places, tile] = torch.bmm(g_CTK.mT, a_CTI)
        return grad_DVI

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the weighted sum of the gradients to ``out``. Cost: 4·B·T·I·V: the tiles, and their products."""
        self._shared.summed = True
        self._sweep(into=_Sum(coef_B, out))

    def masked(self, keep_B: Tensor) -> Head:
        """Return the factor with samples dropped, whose tiles are formed anew."""
        if self.index_D is not None:
            keep_B = torch.ones(len(self.x_BTI), dtype=torch.bool, device=keep_B.device).index_copy(
                0, self.index_D.to(keep_B.device), keep_B
            )
        tokens = Tokens(*(zero_dropped(keep_B, part) for part in self.tokens))
        # The hidden states' gradient is asked of the factor that was not masked.
        self._shared.summed = True
        shared = Shared(wants_input=False, wants_bias=False)
        return Head(tokens, self.table, shared, index_D=self.index_D, double=self.double)

    def selected(self, index_D: Tensor) -> Head:
        index_D = index_D if self.index_D is None else self.index_D.to(index_D.device)[index_D]
        return Head(self.tokens, self.table, self._shared, index_D=index_D, double=self.double)

    def in_double(self) -> Head:
        """Return the factor whose norms and sums are formed in float64, of the same tiles."""
        return Head(self.tokens, self.table, self._shared, index_D=self.index_D, double=True)

    def added_elements(self) -> int:
        return sum(part.numel() for part in self.tokens) - self.x_BTI.numel()


class HeadBias(Dense):
    """The bias of a head, whose per-sample gradients are formed with its weight's norms."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.shape = head.shape[:1]
        self.batch_size = head.batch_size

    @property
    def grad_BP(self) -> Tensor:
        """Per-sample gradients ``(B, V)``, formed at the first read."""
        return self.head.bias_gradients()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and one.data_ptr() == other.data_ptr()


def _require_memory(weight: Tensor) -> None:
    """Refuse a weight whose memory was freed since the gradient arrived."""
    if weight.numel() and not weight.untyped_storage().size():
        raise UnsupportedModelError(
            "a vocabulary head without logits: its weight exists only while its module runs (sharded parameters), and "
            "is needed for the clipped sum. Use strategy='ghost', which forms it while the backward runs."
        )
