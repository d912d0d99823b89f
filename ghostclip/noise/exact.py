"""Level "exact": discrete Gaussian noise on integer sums of rounded gradients, which floating point cannot undermine.

Samples of the discrete Gaussian are exact: a float64 comparison decides where it certainly agrees with the real
numbers, nearly always; otherwise the uniform gets more bits and the comparison is made in decimal arithmetic of
growing precision. Gradients are rounded to a grid sample by sample: the sensitivity of their sum is a whole number.

Letters: B samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ghostclip._validate import positive
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keyed import Block, KeyedNoise, words_of
from ghostclip.noise.keys import RandomKey

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper

Words = Callable[[int, int], NDArray[np.uint64]]
"""(part, count) -> uniform uint64; parts are independent streams, addressed from their beginning."""

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""torch.round or torch.trunc."""

MAX_SCALE = 2.0**32

# Bounds on the error of the float64 arithmetic below, with room for a few units in the last place of log and exp:
# a logarithm is below 64 (unit 2^-47), a probability at most 1 (2^-53).
_LOG_ERROR = 2.0**-43
_PROBABILITY_ERROR = 2.0**-46
_BITS = 63
_MORE_BITS = 128
_MOST_ROUNDS = 128
_DIGITS = 70


def discrete_gaussian(words: Words, count: int, scale: float) -> NDArray[np.int64]:
    """Draw from the discrete Gaussian N_Z(0, s²): P(x) ∝ exp(-x² / (2 s²)) on the integers.

    A discrete Laplace value ⌊t·E⌋ with a random sign (E exponential, t the power of two from s up) is accepted with
    probability exp(-(|x| - s²/t)² / (2 s²)).

    Privacy:
        Added to an integer sum that one unit moves by at most Δ (Euclidean), the divergence of every order α is at most
        αΔ²/(2s²), that of the continuous Gaussian; the binomial expansion of the subsampled mechanism's moments at
        whole orders carries over term by term. Nothing depends on floating-point numbers.

    Reference:
        Canonne, Kamath and Steinke (2020), The Discrete Gaussian for Differential Privacy, Algorithm 3 (the rejection
        scheme), Proposition 5 and Theorem 14 (divergence).
    """
    if not 0 < scale <= MAX_SCALE:
        raise InvalidOptionError(f"scale={scale!r}: must be greater than 0 and at most 2^32 steps of the grid.")
    laplace = 2 ** max(0, math.ceil(math.log2(scale)))
    if laplace < scale:
        laplace *= 2
    accepted: list[NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        number = len(accepted)
        assert number < _MOST_ROUNDS, "a third of all candidates at least is accepted, so that few rounds suffice"
        accepted.append(_round(words, number, 2 * missing + 32, (Fraction(scale), laplace)))
        missing -= len(accepted[-1])
    return np.concatenate(accepted)[:count] if accepted else np.empty(0, dtype=np.int64)


def _round(words: Words, number: int, tries: int, shape: tuple[Fraction, int]) -> NDArray[np.int64]:
    """Draw `tries` candidates of a discrete Gaussian in round `number`, and return the accepted ones."""
    # ``shape``: the scale s of the Gaussian, and t of the discrete Laplace that candidates are drawn from.
    drawn = words(number, 2 * tries)
    first, second = drawn[:tries], drawn[tries:]
    bits = _MoreBits(words, _MOST_ROUNDS + number)
    size = _floor_of_exponential(first >> np.uint64(1), shape[1], bits)
    negative = (first & np.uint64(1)).astype(bool)
    keep = _accept(second >> np.uint64(1), size, shape, bits)
    # Zero has one sign only, or it would be twice as likely.
    keep &= ~(negative & (size == 0))
    return np.where(negative, -size, size)[keep]


class _MoreBits:
    """Additional bits for uniforms that 63 bits do not place on one side of a threshold."""

    def __init__(self, words: Words, part: int) -> None:
        self._words, self._part, self._used = words, part, 0

    def intervals(self, word: int) -> Iterator[tuple[Decimal, Decimal, Decimal, Context]]:
        """Yield nested intervals that contain a uniform with the given first 63 bits, each 128 bits narrower."""
        # Their ends, a margin for rounding, and arithmetic whose rounding is far below it.
        value, bits, digits = word, _BITS, 0
        while True:
            count = self._used + _MORE_BITS // 64
            high, low = self._words(self._part, count)[self._used :].tolist()
            self._used = count
            value, bits, digits = (value << _MORE_BITS) | (high << 64) | low, bits + _MORE_BITS, digits + _DIGITS
            context = Context(prec=digits)
            least, most = (_decimal(Fraction(end, 2**bits), context) for end in (value, value + 1))
            yield least, most, Decimal(10) ** (20 - digits), context


def _floor_of_exponential(words: NDArray[np.uint64], laplace: int, bits: _MoreBits) -> NDArray[np.int64]:
    """Return ⌊-t·log u⌋ for uniforms u with the given first 63 bits; t is a power of two."""
    with np.errstate(divide="ignore"):
        # Of the interval [w, w + 1) / 2^63; t is a power of two, so that multiplying by it does not round.
        longest = (_BITS * math.log(2) - np.log(words.astype(np.float64)) + _LOG_ERROR) * laplace
        shortest = (_BITS * math.log(2) - np.log(words.astype(np.float64) + 1) - _LOG_ERROR) * laplace
    low, high = np.floor(shortest), np.floor(longest)
    unclear = np.flatnonzero(low != high)
    result = low.astype(np.int64)
    for index in unclear.tolist():
        result[index] = _exact_floor(int(words[index]), laplace, bits)
    return result


def _exact_floor(word: int, laplace: int, bits: _MoreBits) -> int:
    """Return ⌊-t·log u⌋, with as many bits of u as that takes."""
    for low, high, margin, context in bits.intervals(word):
        least = context.subtract(context.multiply(Decimal(-laplace), context.ln(high)), margin)
        most = None if low == 0 else context.add(context.multiply(Decimal(-laplace), context.ln(low)), margin)
        if most is not None and math.floor(least) == math.floor(most):
            return math.floor(least)
    raise AssertionError("the intervals shrink for ever")


def _accept(
    words: NDArray[np.uint64], size: NDArray[np.int64], shape: tuple[Fraction, int], bits: _MoreBits
) -> NDArray[np.bool_]:
    """Decide u < exp(-(|x| - s²/t)² / (2 s²)) for uniforms u with the given first 63 bits; ``shape`` is (s, t)."""
    scale, laplace = shape
    s = float(scale)
    uniform = words.astype(np.float64) * 2.0**-_BITS
    chance = np.exp(-(((size - s * s / laplace) / s) ** 2) / 2)
    unclear = np.flatnonzero(np.abs(uniform - chance) <= _PROBABILITY_ERROR)
    result = uniform < chance
    for index in unclear.tolist():
        exponent = (int(size[index]) - scale * scale / laplace) ** 2 / (2 * scale * scale)
        result[index] = _exactly_below(int(words[index]), exponent, bits)
    return result


def _exactly_below(word: int, exponent: Fraction, bits: _MoreBits) -> bool:
    """Return whether u < exp(-exponent), with as many bits of u as that takes."""
    if exponent == 0:
        return True
    for low, high, margin, context in bits.intervals(word):
        chance = context.exp(-_decimal(exponent, context))
        if context.add(high, margin) < chance:
            return True
        if context.subtract(low, margin) > chance:
            return False
    raise AssertionError("the intervals shrink for ever")


def _decimal(value: Fraction, context: Context) -> Decimal:
    """Return a fraction as a decimal number."""
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


class ExactNoise(KeyedNoise):
    """Adds exact samples of the discrete Gaussian to int64 sums of rounded gradients (see `Grid`).

    Privacy:
        The released integers are a discrete Gaussian mechanism on an integer sum whose sensitivity is `Grid.bound`,
        down to the last bit; whatever is computed from them afterwards (scaling, floats, training) is post-processing.
        With s = σ·bound the guarantee is no weaker than that of the continuous Gaussian with σ, as Rényi divergences
        of whole orders bound it; any other accountant of it holds with the δ of `discretisation_delta` added. It
        covers a record's own gradient only as far as that is a function of the record alone: see `Grid.quantize`. One
        rank adds the noise, the others `skip()`, or each adds its shard: integer sums are the same in any order.

    Cost:
        Several times that of `SecureNoise`; on a GPU the noise is drawn on the CPU and copied.
    """

    level = "exact"

    def __init__(self) -> None:
        super().__init__(RandomKey("exact noise"))

    def _check(self, tensor: torch.Tensor) -> None:
        """Refuse tensors that are not int64."""
        if tensor.dtype != torch.int64:
            raise InvalidOptionError(
                f"tensor of {tensor.dtype}: exact noise is added to int64 sums of gradients that Grid.quantize has "
                "rounded sample by sample (grad_sample_mode='hooks'). Use level='secure' for floating-point sums."
            )

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        """Add discrete Gaussian numbers to a part of a block."""
        noise = discrete_gaussian(
            lambda part, count: words_of(self._key, block, part=part, count=count), block.size, std
        )
        part_N.add_(torch.from_numpy(noise)[within].to(part_N.device))


BITS = 24
"""C is 2^24 steps. Up to 2^26, squared norms are whole numbers that float64 sums without rounding."""

_SHRINK = 1 - 2.0**-10
_FLOAT32 = 2.0**-22


@dataclass(frozen=True)
class Grid:
    """The multiples of `step`; a sample's rounded gradient has a Euclidean norm of at most `bound` steps.

    Privacy:
        What is released is the integers and what follows from them, so that the sensitivity is `bound`, a whole number
        that is enforced in whole numbers; `step` only says what they mean.
    """

    step: float  # width of the grid in units of the gradient
    bound: int  # largest norm of one sample's integers: the sensitivity of their sum, at most 2^26

    @classmethod
    def for_norm(cls, max_grad_norm: float) -> Grid:
        """Return the grid on which C is 2^24 steps: rounding is 2^-24 of the noise at σ = 1."""
        return cls(step=positive(max_grad_norm, "max_grad_norm") * 2.0**-BITS, bound=2**BITS)

    @torch.no_grad()
    def quantize(self, grads: Sequence[torch.Tensor], coef_B: torch.Tensor) -> list[torch.Tensor]:
        """Clip and round every sample's gradient to the grid and sum over the samples, in integers.

        z_b = round(f·c_b·g_b / step), where f = (√(bound² - d/6) - 2)/bound - 2^-22 makes room for what rounding d
        coordinates adds to a norm (d/12 to its square, and 0.3 to itself as one standard deviation) and for a factor
        c_b in float32. Whether ‖z_b‖ ≤ bound is then checked in whole numbers, over all parameters together; a sample
        that fails is rounded toward zero from a slightly smaller value, and left out if it fails again or is not
        finite.

        Privacy:
            ‖z_b‖ ≤ bound holds for whatever `grads` and `coef_B` contain, so that the sum's sensitivity to a record
            is `bound`, if the other records' gradients do not depend on it, to the last bit. They must therefore be
            computed record by record (physical batches of one), or by kernels that give a row the same result in
            batches of any size: ordinary matrix products do not promise that.

        Cost:
            Two passes over the gradients, and float64 copies of one parameter's.
        """
        for grad in grads:
            if grad.shape[:1] != coef_B.shape:
                raise InvalidOptionError(
                    f"{tuple(coef_B.shape)} clip factors for per-sample gradients {tuple(grad.shape)}."
                )
        size = sum(grad[0].numel() for grad in grads) if len(coef_B) else 0
        room = 1 - size / (6 * self.bound**2)
        scaled_B = coef_B.to(torch.float64) * ((math.sqrt(room) - 2 / self.bound - _FLOAT32) / self.step)
        nearest_B = self._within(grads, scaled_B, torch.round)
        toward_zero_B = self._within(grads, scaled_B * _SHRINK, torch.trunc)
        return [
            _rounded(grad, scaled_B, torch.round).where(_over(nearest_B, grad), 0)
            .add_(_rounded(grad, scaled_B * _SHRINK, torch.trunc).where(_over(toward_zero_B & ~nearest_B, grad), 0))
            .to(torch.int64).sum(0)
            for grad in grads
        ]  # fmt: skip

    def _within(self, grads: Sequence[torch.Tensor], scale_B: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """Return which samples' rounded gradients keep the bound, decided without rounding errors."""
        # Sums of squares of whole numbers are exact in float64 up to 2^53; larger ones exceed the squared bound, at
        # most 2^52, however they are rounded. NaN compares as false.
        sqnorm_B = torch.zeros_like(scale_B)
        for grad in grads:
            sqnorm_B += _rounded(grad, scale_B, rounding).view(len(scale_B), math.prod(grad.shape[1:])).square().sum(1)
        return sqnorm_B <= float(self.bound) ** 2

    def to_float(self, total: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an int64 sum as gradients, total·step rounded to the dtype."""
        return total.to(torch.float64).mul_(self.step).to(dtype)


def _over(mask_B: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a mask of samples shaped to broadcast over gradients."""
    return mask_B.view(-1, *[1] * (grad.dim() - 1))


def _rounded(grad: torch.Tensor, scale_B: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return c_b·g_b in steps of the grid, rounded to whole numbers, float64."""
    return rounding(grad.to(torch.float64) * _over(scale_B, grad))


class ExactRelease:
    """Rounds per-sample gradients after each backward, and releases the logical batch with discrete noise.

    Privacy:
        A release is the discrete Gaussian mechanism with noise multiplier σ on the logical batch, exactly, for samples
        whose gradients are functions of the sample alone (`Grid.quantize` says what that asks for): physical batches of
        one record make the guarantee hold to the last bit. Until then the integers are as private as the data. The
        clipper's own floating-point sums in `p.grad` are not released.
    """

    # strategy "hooks", with one norm
    def __init__(self, clipper: GhostClipper, source: ExactNoise) -> None:
        """Set up for a clipper with strategy "hooks" and one norm."""
        if clipper.resolve_strategy() != "hooks":
            raise InvalidOptionError(
                f"noise level 'exact' with strategy {clipper.resolve_strategy()!r}: gradients are rounded sample by "
                "sample, which only 'hooks' has. Use grad_sample_mode='hooks', or level 'secure'."
            )
        names = [name for name, _ in clipper.model.named_parameters()]
        if len(clipper.policy.layout(names).bounds) != 1 or clipper.policy.adaptation is not None:
            raise InvalidOptionError(
                "noise level 'exact' with a clip policy of several or adaptive bounds: use one fixed norm per sample."
            )
        self._clipper = clipper
        self._source = source
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._grid: Grid | None = None  # of the logical batch that is open
        self._generation = clipper.generation

    def collect(self) -> None:
        """Clip, round and add the per-sample gradients of the backward that just completed."""
        # Refuse those of several backwards. The bound holds over all parameters, so a sample must be in one call only.
        grads: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self._clipper.trainable_parameters():
            samples = self._clipper.take_samples(parameter)
            if len(samples) > 1:
                raise InvalidOptionError(
                    f"{len(samples)} backwards before one step at noise level 'exact': call step() after each backward "
                    "(physical batches: BatchMemoryManager), or add up the losses."
                )
            if samples:
                grads[parameter] = samples[0]
        if not grads:
            return
        totals = self._open().quantize(list(grads.values()), self._clipper.clip_coefficients)
        for parameter, total in zip(grads, totals, strict=True):
            self._sums[parameter] = total if parameter not in self._sums else self._sums[parameter].add_(total)

    def release(self, parameters: Sequence[nn.Parameter], *, std: float) -> list[torch.Tensor]:
        """Return Σ_b c_b·g_b + noise of each parameter in a fixed order, and forget the logical batch."""
        # A parameter without a sum is noise alone; one whose sum would not be released is refused.
        grid = self._open()
        sums, self._sums, self._grid = self._sums, {}, None
        known = set(map(id, parameters))
        if any(id(parameter) not in known for parameter in sums):
            raise InvalidOptionError("parameters: gradients were added for a parameter that is not released.")
        # Rounded up: never less noise than was asked for.
        in_bounds = math.nextafter(std / (grid.step * grid.bound), math.inf) if std > 0 else 0.0
        released = []
        for parameter in parameters:
            total = sums.pop(parameter, None)
            if total is None:
                total = torch.zeros(parameter.shape, dtype=torch.int64, device=parameter.device)
            self._source.add_(total, in_bounds * grid.bound)
            released.append(grid.to_float(total, dtype=torch.promote_types(parameter.dtype, torch.float32)))
        return released

    def _open(self) -> Grid:
        """Return the grid of the clipper's present logical batch; the sums of a discarded one are discarded."""
        if self._grid is None or self._generation != self._clipper.generation:
            self._generation = self._clipper.generation
            self._sums = {}
            # The bound in force when a logical batch begins; a schedule may change it in between.
            self._grid = Grid.for_norm(self._clipper.max_grad_norm)
        return self._grid
