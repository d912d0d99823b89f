"""Rounding error bounds of squared norms and of sums: one definition for kernels, their twins and factors.

The proof that they add up to a bound on every sample's contribution is in docs/floating-point.md.

Shape letters: N samples (times slots), T positions, I inputs, O outputs, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import Final, NamedTuple

import torch
from torch import Tensor

HALF: Final = (torch.float16, torch.bfloat16)

CHAIN_OF_KERNELS: Final = 512
"""Products of float32 that a kernel of ours adds up before it starts a new sum."""

UNIT_STEP: Final = 16
"""Products that a matrix unit adds up at once, to what it has added up before."""

UNIT_LOSS: Final = 2.0**-20
"""What such a step may take, as a share of the largest of what it adds. Hopper aligns 17 numbers to that, each cut off
two bits behind the last place (17·2^-25), and cuts off the sum (2^-23): a fifth of it. Ampere adds eight at a time."""

UNIT_CHAIN: Final = 4096
"""Products that matrix units add up before a new sum is started: at most 256 steps, 2.5e-4 of the largest partial
sum."""

SPLIT_ROUNDINGS: Final = 1 + 2**8
"""Roundings (of 2^-24) of a term that is weighted in two parts of 8 bits each, the second being what the first leaves
over: 2^-16."""

CHAIN: Final = 128
"""Products that a matrix product on a CPU adds up before a new sum is started, where nothing shows how it rounds.

A sum that grows rounds the same way for as long as it lies between two powers of two: 384 equal products, as many as
MKL adds up in a row, come out 51 roundings (of 2^-24) too small, 128 of them 26.
"""

UNSEEN_DRIFT: Final = 26
"""Roundings by which dot products of equal terms may be too small where no diagonal shows them: there is none, or
nothing more precise than float64 to hold it against."""

DRIFT_MARGIN: Final = 1.5
"""Errors of products are taken to be this many times those that are seen on the diagonals, see `gram_error`; 1.4 times
were the most that a search over clusters, constants and terms that are rounded away found."""

PRODUCT_ROUNDINGS: Final = 4
"""Roundings of a Gram's products and of their sum that no diagonal shows."""

CROSS_ROUNDINGS: Final = 32
"""Roundings of products between two uses of a parameter, of which no diagonal shows any: those of `CHAIN` products."""

SUM_ROUNDINGS: Final = 8
"""Roundings of a sum of products whose signs and sizes do not conspire, over the root of the sum of their squares."""

LEAST: Final = 1e-12
"""Norms that are not told from zero: a millionth of the smallest bound that a norm is compared with, 1e-6."""

# Equal values round alike: a sum of this many of their squares in float32, 16 in each lane of a processor, loses less
# than a norm is rounded up by. On a GPU thousands of threads share a sum, so that each rounds less often.
_BLOCK: Final = 256 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 128
_BLOCK_IN_THREADS: Final = 4096
FEW: Final = 8
"""Norms of blocks whose squares are added up in float32: their sum and its root take 5 roundings of a norm at most."""

# So many numbers of blocks are tried for one that divides the values evenly.
_MORE_BLOCKS: Final = 8


class Bounded(NamedTuple):
    """Squared norms of sums of terms, with what bounds their rounding and that of the sums."""

    value_N: Tensor  # squared norms, shape ``(N,)``; a Gram sum that cancels may come out slightly negative
    error_N: Tensor  # how far ``value_N`` may lie below the true value, same shape
    mass_N: Tensor  # sum of the terms' norms, ``Σ_t |a_t|·|g_t|`` for outer products, same shape
    scale_N: Tensor  # sum of the terms' squared norms, ``Σ_t |a_t|²·|g_t|²`` for outer products, same shape


class Unfinished(NamedTuple):
    """Squared norms of sums of outer products, and the values from which `finished` works out errors and masses."""

    value_N: Tensor  # may be slightly negative
    a_NT: Tensor  # norms of the layer's input, by position
    g_NT: Tensor  # norms of the output gradient
    sizes: tuple[int, int]  # I and O
    # ``Σ_{s,t} |(a_s·a_t)(g_s·g_t)|``; None where gradients were formed instead of their Gram matrix
    absolute_N: Tensor | None = None
    # ``a_t·a_t`` and ``g_t·g_t`` as the products left them, (2, N, T); None where no diagonal is read
    square_KNT: Tensor | None = None
    drift: float | None = None  # relative error assumed of dot products where no diagonal is read
    by_units: bool = False  # whether matrix units formed products
    weighting: int = 1  # roundings of a term when it is weighted for the clipped sum

    @property
    def positions(self) -> int:
        """T."""
        return self.a_NT.shape[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for results that can be finished in one operation."""
        alike = self.a_NT.shape, self.a_NT.dtype, self.a_NT.device, self.by_units, self.weighting
        return *alike, self.value_N.dtype, self.absolute_N is None, self.square_KNT is None, self.drift


class Reduced(NamedTuple):
    """A kernel's sums for squared norms of sums of outer products, one row per program."""

    part_NPK: Tensor  # float64, in the order of `COLUMNS`; only the first `FORMED_COLUMNS` where gradients were formed
    positions: int
    sizes: tuple[int, int]  # I and O
    by_units: bool = False  # whether matrix units formed products
    weighting: int = 1  # roundings of a term when it is weighted for the clipped sum

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for results that can be finished in one operation."""
        return "reduced", self.part_NPK.shape, self.part_NPK.device, self.positions, self.by_units, self.weighting


COLUMNS: Final = (
    "value",  # squared norms
    "mass",  # Σ_t |a_t|·|g_t|
    "scale",  # Σ_t |a_t|²·|g_t|²
    "inputs",  # Σ_t |a_t|
    "gradients",  # Σ_t |g_t|
    "absolute",  # Σ_{s,t} |(a_s·a_t)(g_s·g_t)|
    "inputs off",  # Σ_t ((a_t·a_t) - |a_t|²)²·w_t², as products left the first; w_t = |a_t|·|g_t|
    "inputs whole",  # Σ_t |a_t|⁴·w_t²
    "gradients off",
    "gradients whole",
)
"""What the columns of `Reduced` hold."""

FORMED_COLUMNS: Final = 5


class Product(NamedTuple):
    """Norms of the two factors of one outer product per sample."""

    a_NK: list[Tensor]  # norms of blocks of the layer inputs
    g_N1: Tensor  # norm of the output gradient
    sizes: tuple[int, int]  # I and O


def product_norms(terms: Sequence[Product]) -> list[Tensor]:
    """Return tensors of norms ``(N, K)`` whose squares add up to those of the outer products, rounded up."""
    # All of one dtype and device; the largest sizes stand for all. The last tensor is what may have underflowed.
    inputs, outputs = map(max, zip(*[one.sizes for one in terms], strict=True))
    a_NK, g_NK = _side_by_side([part for one in terms for part in one.a_NK]), _side_by_side([one.g_N1 for one in terms])
    a_N1, g_N1 = [torch.linalg.vector_norm(norms_NK, dim=1, keepdim=True) for norms_NK in (a_NK, g_NK)]
    products = _side_by_side([part_NK * one.g_N1 for one in terms for part_NK in one.a_NK])
    return [rounded_up_(products), vanished(a_N1, g_N1, inputs, outputs)]


def rounded_up_(norms: Tensor) -> Tensor:
    """Increase norms in place by more than their rounding error."""
    return norms.add_(norms, alpha=8 * torch.finfo(norms.dtype).eps)


def finished(norms: Sequence[Unfinished | Reduced]) -> Bounded:
    """Return squared norms with errors, ``(L, N)``, of L results of one kind."""
    # The largest of their sizes stand for all.
    reduced = [one for one in norms if isinstance(one, Reduced)]
    if reduced:
        return _finished_reduced(reduced)
    return _finished_unfinished([one for one in norms if isinstance(one, Unfinished)])


def _finished_reduced(reduced: Sequence[Reduced]) -> Bounded:
    """Return squared norms with error bounds from the sums that a kernel left."""
    inputs, outputs = (max(one.sizes[side] for one in reduced) for side in (0, 1))
    sums_KLN = torch.stack([one.part_NPK for one in reduced]).sum(2).movedim(2, 0)
    value_LN, mass_LN, scale_LN, a_LN, g_LN, *rest = sums_KLN.float().unbind()
    lost_LN = vanished(a_LN, g_LN, inputs, outputs)
    measured = Masses(mass_LN + lost_LN, scale_LN, lost_LN)
    first = reduced[0]
    if not rest:
        error_LN = formed_error(value_LN, measured, first.positions if first.by_units else 0)
        return Bounded(value_LN, error_LN, measured.mass_N, scale_LN)
    # In float64, where eighth powers of norms fit.
    off_KLN, whole_KLN = sums_KLN[-4::2], sums_KLN[-3::2]
    share_KLN = off_KLN.div_(whole_KLN.clamp_(min=torch.finfo(torch.float64).tiny)).sqrt_()
    error_LN = gram_error(rest[0], share_KLN.sum(0).float(), measured, inputs + outputs, by_units=first.by_units)
    return Bounded(value_LN, error_LN, measured.mass_N, scale_LN)


def _finished_unfinished(unfinished: Sequence[Unfinished]) -> Bounded:
    """Return squared norms with error bounds from the sums of the plain-PyTorch twin."""
    first = unfinished[0]
    inputs, outputs = (max(one.sizes[side] for one in unfinished) for side in (0, 1))
    norm_LKNT = torch.stack([x for one in unfinished for x in (one.a_NT, one.g_NT)]).unflatten(0, (-1, 2))
    measured = masses(norm_LKNT[:, 0], norm_LKNT[:, 1], inputs, outputs)
    value_LN = torch.stack([one.value_N for one in unfinished])
    absolute = [one.absolute_N for one in unfinished if one.absolute_N is not None]
    if not absolute:
        error_LN = formed_error(value_LN, measured, first.a_NT.shape[1] if first.by_units else 0)
        return Bounded(value_LN, error_LN, measured.mass_N, measured.scale_N)
    squares = [one.square_KNT for one in unfinished if one.square_KNT is not None]
    drift_LN = drift(torch.stack(squares), norm_LKNT) if squares else first.drift
    assert drift_LN is not None
    error_LN = gram_error(torch.stack(absolute), drift_LN, measured, inputs + outputs, by_units=first.by_units)
    return Bounded(value_LN, error_LN, measured.mass_N, measured.scale_N)


def finished_one(norm: Unfinished | Reduced) -> Bounded:
    """Return `finished` of one result, shape ``(N,)``."""
    return Bounded(*(part.squeeze(0) for part in finished([norm])))


def samples_joined(slices: Sequence[Unfinished | Reduced]) -> Unfinished | Reduced:
    """Concatenate the squared norms of slices of samples that were formed in the same way."""
    first = slices[0]
    if len(slices) == 1:
        return first
    if isinstance(first, Reduced):
        # Fewer samples may have had more programs.
        rows = [one.part_NPK.sum(1, keepdim=True) for one in slices if isinstance(one, Reduced)]
        return first._replace(part_NPK=torch.cat(rows))
    parts = [one for one in slices if isinstance(one, Unfinished)]
    absolute = [part.absolute_N for part in parts if part.absolute_N is not None]
    squares = [part.square_KNT for part in parts if part.square_KNT is not None]
    return parts[0]._replace(
        value_N=torch.cat([part.value_N for part in parts]),
        a_NT=torch.cat([part.a_NT for part in parts]),
        g_NT=torch.cat([part.g_NT for part in parts]),
        absolute_N=torch.cat(absolute) if absolute else None,
        square_KNT=torch.cat(squares, 1) if squares else None,
    )


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u, the largest relative error of one rounding: 2^-24 for float32, 2^-53 for float64."""
    return torch.finfo(dtype).eps / 2


def formed_error(value_N: Tensor, measured: Masses, by_units: int = 0) -> Tensor:
    """Return a bound on the rounding error of the squared norm of a formed gradient."""
    # `by_units`: positions that matrix units added up, which cut off; 0 where nothing did. No weights are rounded here:
    # of the mass only what underflow may have taken counts.
    delta_N = sum_rounding(measured.lost_N, measured.scale_N, unit_roundoff(value_N.dtype))
    if by_units:
        # Partial sums of terms that do not conspire are no larger than the sum or the root of the terms' squares.
        largest_N = measured.scale_N.sqrt().add_(value_N.clamp(min=0).sqrt())
        delta_N = delta_N.add_(largest_N, alpha=UNIT_LOSS * unit_steps(by_units))
    return error_of_raised(value_N, delta_N)


def unit_steps(products: int) -> int:
    """Return how often matrix units add to one sum of so many products."""
    return -(-min(products, UNIT_CHAIN) // UNIT_STEP)


def gram_error(
    absolute_N: Tensor, drift_N: Tensor | float, measured: Masses, width: int, *, by_units: bool = False
) -> Tensor:
    """Return a bound on the rounding error of a squared norm from a Gram matrix."""
    # Errors of dot products are of two kinds. Those from what the positions have in common are alike for all pairs, and
    # are bounded by a share of the sum of absolute values, `drift_N`, which is measured where the norms of positions
    # are known. The others are independent from pair to pair and behave like a random walk over the pairs.
    unit = UNIT_LOSS if by_units else unit_roundoff(absolute_N.dtype)
    share_N = drift_N * DRIFT_MARGIN + PRODUCT_ROUNDINGS * unit
    error_N = (absolute_N * share_N).add_(measured.scale_N, alpha=unit * (4 + sqrt(width) / 4))
    return error_N.addcmul_(measured.lost_N, measured.lost_N)


def drift(formed_LKNT: Tensor, norm_LKNT: Tensor) -> Tensor:
    """Return the relative error, ``(L, N)``, of squared norms ``x_t·x_t`` that matrix products formed."""
    # Root of the mean square over positions, weighted by the norm of their outer product, summed over both factors.
    weight_LKNT = norm_LKNT.prod(1, keepdim=True)
    square_LKNT = norm_LKNT.square()
    off_LKN = torch.linalg.vector_norm((formed_LKNT - square_LKNT).mul_(weight_LKNT), dim=3)
    whole_LKN = torch.linalg.vector_norm(square_LKNT.mul_(weight_LKNT), dim=3)
    return off_LKN.div_(whole_LKN.clamp_(min=torch.finfo(whole_LKN.dtype).tiny)).sum(1)


def sum_rounding(mass: Tensor, scale: Tensor, unit: float) -> Tensor:
    """Return a bound on the rounding error of a weighted sum of terms, beyond that of the weights."""
    # Every term is rounded once when it is weighted: at most u·Σ|term| in all. The sum's own rounding is a random walk.
    return unit * (mass + SUM_ROUNDINGS * scale.sqrt())


def error_of_raised(value: Tensor, delta: Tensor) -> Tensor:
    """Return ``(√value + δ)² - value``: the error of a squared norm whose root may be δ too small."""
    return delta * (2 * value.clamp(min=0).sqrt() + delta)


def position_norms(x_NTF: Tensor) -> Tensor:
    """Return the norm of every position, ``(N, T)``, added up in short blocks whose rounding is known."""
    x_NTF = _along_memory(x_NTF)
    if x_NTF.shape[2] <= (_BLOCK if x_NTF.is_cpu else _BLOCK_IN_THREADS):
        # Widened as they are read: no copy in float32 is made.
        wide = None if x_NTF.dtype == torch.float32 else torch.promote_types(x_NTF.dtype, torch.float32)
        return torch.linalg.vector_norm(x_NTF, dim=2, dtype=wide)
    # On a CPU a copy is quicker than blocks that are widened as they are read.
    flat_BP = (widened(x_NTF) if x_NTF.is_cpu else x_NTF).flatten(0, 1)
    return root_of_squares(block_norms(flat_BP)).view(x_NTF.shape[:2])


def vanished(a: Tensor, g: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return what underflow may have taken from the norm of an outer product: ``√(O·tiny)·|a| + √(I·tiny)·|g|``."""
    # Of O numbers whose squares underflow, a norm may miss √(O·tiny), 1e-19 in float32: it matters only beside a factor
    # that is as large as they are small. Below `LEAST` the result is exactly zero.
    tiny = torch.finfo(a.dtype).tiny
    lost = torch.add(a * sqrt(outputs * tiny), g, alpha=sqrt(inputs * tiny))
    return torch.nn.functional.threshold(lost, LEAST, 0.0)


class Masses(NamedTuple):
    """Norms of outer products, added up over positions."""

    mass_N: Tensor  # ``Σ_t |a_t|·|g_t|``, and what underflow may have taken from it, shape ``(N,)``
    scale_N: Tensor  # ``Σ_t |a_t|²·|g_t|²``, shape ``(N,)``
    lost_N: Tensor  # what underflow may have taken, see `vanished`, shape ``(N,)``


def masses(a_NT: Tensor, g_NT: Tensor, inputs: int, outputs: int) -> Masses:
    """Return the sums over positions that rounding of a sum of outer products is in proportion to."""
    product_NT = a_NT * g_NT
    lost_N = vanished(a_NT.sum(-1), g_NT.sum(-1), inputs, outputs)
    return Masses(product_NT.sum(-1).add_(lost_N), product_NT.square_().sum(-1), lost_N)


def block_norms(flat_BP: Tensor) -> list[Tensor]:
    """Return norms of blocks of values, ``(B, K)``, whose squares add up to ``Σ_p x[b,p]²``, without a squared copy."""
    # Torch's float32 norm on a CPU comes out 2e-5 too small for a million random values and 4e-6 for 4096 equal ones,
    # which would let a sample through above the bound; over blocks of 16 squares a lane it stays below 5e-7.
    flat_BP = _along_memory(flat_BP)
    size, values = _BLOCK if flat_BP.is_cpu else _BLOCK_IN_THREADS, flat_BP.shape[1]
    wide = torch.float32 if flat_BP.element_size() == 2 else None
    if values <= size:
        return [torch.linalg.vector_norm(flat_BP, dim=1, keepdim=True, dtype=wide)]
    # Blocks of one size where they come out even, and one operation does.
    even = _even_blocks(values, size)
    if even:
        return [torch.linalg.vector_norm(flat_BP.view(len(flat_BP), even, values // even), dim=2, dtype=wide)]
    blocks, rest = divmod(values, size)
    whole_BKP = flat_BP[:, : blocks * size].unflatten(1, (blocks, size))
    last_BP = flat_BP[:, -rest:]
    last_B1 = torch.linalg.vector_norm(last_BP, dim=1, keepdim=True, dtype=wide)
    return [torch.linalg.vector_norm(whole_BKP, dim=2, dtype=wide), last_B1]


def _along_memory(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous."""
    # Lanes share the squares of a norm only then; else 256 equal values come out 33 roundings too small.
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=4096)
def _even_blocks(values: int, size: int) -> int:
    """Return into how many blocks of at most ``size`` values can be divided evenly; 0 if not into few."""
    fewest = -(-values // size)
    return next((count for count in range(fewest, fewest + _MORE_BLOCKS) if values % count == 0), 0)


def sum_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return ``Σ_k n[b,k]²`` over several norms, added up in float64: hundreds of squares drift in float32."""
    norms_BK = _side_by_side(norms)
    if norms_BK.shape[1] == 1:
        return norms_BK.squeeze(1).square()
    return torch.linalg.vector_norm(norms_BK, dim=1, dtype=torch.float64).square_().to(norms_BK.dtype)


def root_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return ``√(Σ_k n[b,k]²)`` over several norms, shape ``(B,)``; up to `FEW` norms are added in their own dtype."""
    norms_BK = _side_by_side(norms)
    if norms_BK.shape[1] == 1:
        return norms_BK.squeeze(1).clone()
    if norms_BK.shape[1] <= FEW:
        return torch.linalg.vector_norm(norms_BK, dim=1)
    return torch.linalg.vector_norm(norms_BK, dim=1, dtype=torch.float64).to(norms_BK.dtype)


def _side_by_side(norms: Sequence[Tensor]) -> Tensor:
    """Return norms ``(N, K)`` concatenated along K."""
    return norms[0] if len(norms) == 1 else torch.cat(list(norms), 1)


def dots(left_NTF: Tensor, right_NUF: Tensor) -> Tensor:
    """Return all dot products of positions ``x_t·y_u``, shape ``(N, T, U)``; on a CPU in sums of `CHAIN` products."""
    features = left_NTF.shape[2]
    if features <= CHAIN or left_NTF.device.type != "cpu":
        return torch.bmm(left_NTF, right_NUF.mT)
    size = -(-features // -(-features // CHAIN))
    pairs = zip(left_NTF.split(size, 2), right_NUF.split(size, 2), strict=True)
    left, right = next(pairs)
    product_NTU = torch.bmm(left, right.mT)
    for left, right in pairs:
        product_NTU.baddbmm_(left, right.mT)
    return product_NTU


def widened(tensor: Tensor) -> Tensor:
    """Return a real or complex tensor in at least 32 bits a number (no copy when it is there already)."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.promote_types(tensor.dtype, torch.float32))
