"""δ(ε) of composed steps, from above and from below, by one integral in the complex plane.

With M(s) = E[e^{sL}] the moment generating function of the total privacy loss L under P, and any c > 0,

    δ(ε) = E[(1 - e^{ε-L})₊] = 1/2πi ∫ M(s) e^{-sε} / (s(s+1)) ds   over Re s = c,

and M is the product of the steps' own functions, each a finite sum (`pairs`). So nothing is convolved, no common grid
of losses exists, and the cost does not depend on the number of steps. What is left to bound:

- *Truncation.* A Gaussian mechanism of variance v is added to the history. Its losses ξ have E[e^-ξ] = 1, so δ can
  only grow; and the integrand falls like e^{-vt²/2}, so what lies beyond the last node is bounded in closed form.
- *What that added.* ∂δ/∂v = p/2 with p the density of L + ξ at ε, and at a variance w ≤ v that density is at most
  √(v/w)·e^{v/8} times the one at v. Integrated: δ_v(ε) - δ(ε) ≤ v·e^{v/8}·p_v(ε), and p is the same integral without
  the denominator.
- *Nodes.* The trapezoidal rule with step 2π/W gives Σ_k e^{ckW} δ(ε + kW) exactly: too much, never too little; terms
  k ≠ 0 are bounded by Chernoff's inequality for the lower bound.
- *Rounding.* Every factor's relative error is bounded and carried along (`Composition.along`), that of K and of cε
  is added to the exponent (`Composition.moment_error`).
- *Cut.* Where nearly all mass lies close to 0 and δ far below it, the integrand is mostly that mass, and its rounding
  would be larger than δ. Let every step's M be A + B, A of losses up to a cut and B of the others. Outcomes with all
  losses in A are bounded by Chernoff's inequality alone (`Composition.log_below`), as A's losses are small; what is
  left is a measure too, ΠM - ΠA = ΠA·(exp Σ log(1 + B/A) - 1), to which all of the above applies, and its rounding is
  relative to itself (`Composition.along_above`).

Letters: J atoms, N nodes of the contour, K = log M.

Reference:
    Zhu, Dong, Wang 2022 (characteristic functions); Alghamdi et al. 2023 (the contour and its saddle point). The
    smoothing and its two-sided bound are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ghostclip.accounting.pairs import Array, DiscretePair

Complex = NDArray[np.complex128]

DECAY = 38.0
"""The integrand is followed until smoothing alone has brought it down by e^-38."""

MOST_NODES = 1 << 17
ROUNDOFF = 2.0**-53

MASS_ERROR = 2.0**-43
"""Relative error that an atom's mass may have: quadrature, density and normal tail together stay below it."""


class Composition:
    """The total privacy loss of several steps, each made a number of times."""

    def __init__(self, pairs: Sequence[DiscretePair], counts: Sequence[int], gaussian: float = 0.0) -> None:
        self.pairs = tuple(pairs)
        self.gaussian = gaussian
        self._moments: dict[float, tuple[float, float, float]] = {}
        self._errors: dict[float, float] = {}
        self.count_P = np.array(counts, dtype=np.float64)
        survived = math.fsum(
            count * math.log1p(-pair.infinite) if pair.infinite < 1 else -math.inf
            for pair, count in zip(pairs, counts, strict=True)
        )
        # The sum is no smaller, and exact for a single pair.
        revealed = math.fsum(count * pair.infinite for pair, count in zip(pairs, counts, strict=True))
        self.infinite = min(-math.expm1(survived), revealed)
        if self.pairs:
            self._loss_J = np.concatenate([pair.loss_J for pair in self.pairs])
            with np.errstate(divide="ignore"):
                self._log_mass_J = np.log(np.concatenate([pair.mass_J for pair in self.pairs]))
            self._starts = np.cumsum([0, *(pair.loss_J.size for pair in self.pairs[:-1])])
            self._sizes = [pair.loss_J.size for pair in self.pairs]

    def log_moment(self, c: float) -> tuple[float, float, float]:
        """Return K(c), K'(c) and K''(c)."""
        if c in self._moments:
            return self._moments[c]
        smooth = self.gaussian
        value, slope, bend = smooth * (c * c + c) / 2, smooth * (c + 0.5), smooth
        if self.pairs:
            log_P, weight_J = self._tilted(c)
            mean_P = np.add.reduceat(weight_J * self._loss_J, self._starts)
            off_J = self._loss_J - np.repeat(mean_P, self._sizes)
            variance_P = np.add.reduceat(weight_J * off_J * off_J, self._starts)
            self._errors[c] = float(self.count_P @ (self._unsure(c, weight_J) + 4 * ROUNDOFF * np.abs(log_P)))
            value += float(self.count_P @ log_P)
            slope += float(self.count_P @ mean_P)
            bend += float(self.count_P @ variance_P)
        self._moments[c] = value, slope, bend
        return value, slope, bend

    def moment_error(self, c: float) -> float:
        """Return a bound of the absolute rounding error of K(c)."""
        value = self.log_moment(c)[0]
        return self._errors.get(c, 0.0) + 16 * ROUNDOFF * (abs(value) + self.gaussian * (c * c + c))

    def _unsure(self, c: float, weight_J: Array) -> Array:
        """Bound the relative error of each pair's M(c), and of M(c + it) in units of M(c) for t = 0, shape [P]."""
        # An atom's share carries the errors of its mass, of the exponent c·l + log m and of the loss; J of them are
        # added in an unknown order.
        with np.errstate(invalid="ignore"):
            exponent_J = 8 * np.abs(c * self._loss_J) + 2 * np.abs(self._log_mass_J)
        exponent_J[weight_J == 0] = 0.0
        sums_P = np.add.reduceat(weight_J * exponent_J, self._starts)
        return np.asarray(MASS_ERROR + ROUNDOFF * (64 + 2 * np.array(self._sizes) + sums_P), dtype=np.float64)

    def largest_loss(self) -> float:
        """Return an upper bound of the finite losses: δ(ε) is the probability of an infinite one from there on."""
        if self.gaussian:
            return math.inf
        top = math.fsum(count * float(pair.loss_J.max()) for pair, count in zip(self.pairs, self.count_P, strict=True))
        return max(0.0, top * (1 + 1e-12))

    @property
    def is_single(self) -> bool:
        """Whether it is of one step with atoms."""
        return len(self.pairs) == 1 and self.count_P[0] == 1 and not self.gaussian

    def delta_of_single(self, epsilon: float) -> tuple[float, float]:
        """Return (lower, upper) bounds of δ(ε) of one step, by the sum over its atoms, in which nothing cancels."""
        (pair,) = self.pairs
        above_J = pair.loss_J > epsilon
        loss_J, mass_J = pair.loss_J[above_J], pair.mass_J[above_J]
        value = float(mass_J @ -np.expm1(epsilon - loss_J))
        error = float(mass_J @ (abs(epsilon) + np.abs(loss_J))) * 4 * ROUNDOFF
        error += value * (MASS_ERROR + ROUNDOFF * (64 + 2 * pair.loss_J.size))
        return pair.infinite + max(0.0, value - error), pair.infinite + value + error

    def total_variation(self) -> float:
        """Return an upper bound of δ(0): the sum over the steps' own, and Pinsker's inequality for Gaussian ones."""
        return (1 + 1e-9) * math.fsum(
            [
                *(
                    count * (pair.infinite - float(pair.mass_J @ np.expm1(np.minimum(-pair.loss_J, 0.0))))
                    for pair, count in zip(self.pairs, self.count_P, strict=True)
                ),
                math.sqrt(self.gaussian) / 2,
            ]
        )

    def _tilted(self, c: float) -> tuple[Array, Array]:
        """Return log M of each pair at c, and each atom's share in it."""
        exponent_J = c * self._loss_J + self._log_mass_J
        peak_P = np.maximum.reduceat(exponent_J, self._starts)
        weight_J = np.exp(exponent_J - np.repeat(peak_P, self._sizes))
        total_P = np.add.reduceat(weight_J, self._starts)
        return peak_P + np.log(total_P), weight_J / np.repeat(total_P, self._sizes)

    def log_below(self, c: float, cut: float) -> float:
        """Return log of E[e^{cL}; every loss is at most `cut`], rounded upwards."""
        smooth = self.gaussian * (c * c + c) / 2
        if not self.pairs:
            return smooth
        value = float(self.count_P @ self._log_parts(c, self._loss_J <= cut))
        return smooth + value + self.moment_error(c) + 16 * ROUNDOFF * abs(value)

    def log_above(self, c: float, cut: float) -> float:
        """Return log of E[e^{cL}; some loss is larger than `cut`], to a millionth."""
        if not self.pairs:
            return -math.inf
        above_P, below_P = (self._log_parts(c, chosen) for chosen in (self._loss_J > cut, self._loss_J <= cut))
        more = float(self.count_P @ (np.logaddexp(above_P, below_P) - below_P))
        both = self.log_moment(c)[0]
        return both + math.log(-math.expm1(-more)) if more > 0 else -math.inf

    def _log_parts(self, c: float, chosen_J: NDArray[np.bool_]) -> Array:
        """Return log E[e^{cL}; chosen] of each pair, shape [P]."""
        exponent_J = np.where(chosen_J, c * self._loss_J + self._log_mass_J, -math.inf)
        peak_P = np.maximum(np.maximum.reduceat(exponent_J, self._starts), -1e300)
        with np.errstate(divide="ignore"):
            total_P = np.log(np.add.reduceat(np.exp(exponent_J - np.repeat(peak_P, self._sizes)), self._starts))
        return np.asarray(peak_P + np.maximum(total_P, -1e300), dtype=np.float64)

    def along_above(self, c: float, step: float, nodes: int, cut: float) -> tuple[Complex, Array]:
        """Return (ΠM - ΠA)(c + it) / M(c) without the Gaussian part at t = 0, step, …, and its error bound, [N]."""
        # With a and b the computed values of A and B, and e, f bounds of their errors, all normalised by M(c): the
        # difference is a polynomial with positive coefficients in A and B, so its error is at most what it changes by
        # from (|a|, |b|) to (|a| + e, |b| + f), which is at most R·(e^{E + X}·(e^F - 1) + (e^E - 1)·(e^X - 1)) with R =
        # Π|a|, X = Σ log(1 + |b|/|a|), E = Σ log(1 + e/|a|), F = Σ log(1 + f/(|a| + |b|)): no term of it cancels. Where
        # |a| is itself of the size of its error, the errors of ΠM and of ΠA, added, are less.
        log_a_N, x_N = np.zeros(nodes, dtype=np.complex128), np.zeros(nodes, dtype=np.complex128)
        sizes = np.zeros((4, nodes))
        all_J = self._tilted(c)[1]
        for start, size, count in zip(self._starts, self._sizes, self.count_P, strict=True):
            there = slice(start, start + size)
            low_J = self._loss_J[there] <= cut
            a_N, unsure_a = self._part(c, there, np.where(low_J, all_J[there], 0.0), (step, nodes))
            b_N, unsure_b = self._part(c, there, np.where(low_J, 0.0, all_J[there]), (step, nodes))
            a_N = np.where(np.abs(a_N) > 1e-300, a_N, 1e-300)
            size_a_N, whole_N = np.abs(a_N), np.abs(a_N) + np.abs(b_N)
            log_a_N += count * np.log(a_N)
            rise_N = count * _log1p(b_N / a_N)
            x_N += rise_N
            sizes += [
                count * np.log1p(np.abs(b_N) / size_a_N),
                count * np.log1p(unsure_a / size_a_N),
                count * np.log1p(unsure_b / whole_N) + 8 * ROUNDOFF * np.abs(rise_N),
                count * np.log1p((unsure_a + unsure_b) / whole_N),
            ]
        return _difference(log_a_N, x_N, sizes)

    def _part(self, c: float, there: slice, weight_J: Array, along: tuple[float, int]) -> tuple[Complex, float]:
        """Return what some atoms of a pair add to M(c + it) / M(c) at t = 0, step, …, and a bound of its error."""
        some_J = weight_J > 0
        weight_J, loss_J = weight_J[some_J], self._loss_J[there][some_J]
        step, nodes = along
        mass, rows = float(weight_J.sum()), 16 * (math.isqrt(nodes) + 1)
        size_J = 8 * np.abs(c * loss_J) + 2 * np.abs(self._log_mass_J[there][some_J])
        far = float(weight_J @ (size_J + 8 * step * nodes * np.abs(loss_J)))
        # What underflows beside the other part is below 1e-300.
        unsure = 1e-300 + MASS_ERROR * mass + ROUNDOFF * ((64 + 2 * some_J.size + rows) * mass + far)
        return _transform(loss_J, weight_J, step, nodes), unsure

    def along(self, c: float, step: float, nodes: int) -> tuple[Complex, Array]:
        """Return log(M(c + it) / M(c)) without the Gaussian part at t = 0, step, …, and a bound of its error, both [N].

        Cost:
            2·J·√N exponentials and a J·N matrix product for each pair.
        """
        total_N, error_N = np.zeros(nodes, dtype=np.complex128), np.zeros(nodes)
        if not self.pairs:
            return total_N, error_N
        all_J = self._tilted(c)[1]
        weights, unsure_P = np.split(all_J, self._starts[1:]), self._unsure(c, all_J)
        # Tables of powers are made by products: an error of e^{it} grows with the power.
        powers = 16 * (math.isqrt(nodes) + 1)
        for pair, weight_J, count, still in zip(self.pairs, weights, self.count_P, unsure_P.tolist(), strict=True):
            share_N = _transform(pair.loss_J, weight_J, step, nodes)
            spread = float(weight_J @ np.abs(pair.loss_J))
            unsure = still + ROUNDOFF * (powers + 8 * step * nodes * spread)
            size_N = np.maximum(np.abs(share_N), 1e-300)
            total_N += count * np.log(np.where(np.abs(share_N) > 0, share_N, 1e-300))
            error_N += count * np.log1p(unsure / size_N)
        return total_N, error_N


def _difference(log_a_N: Complex, x_N: Complex, sizes: Array) -> tuple[Complex, Array]:
    """Return e^(log a)·(e^x - 1) and a bound of its error, as `Composition.along_above` describes."""
    # log_a_N: log ΠA. x_N: log of ΠM / ΠA. sizes: X, E, F, and Σ log(1 + (e + f)/(|a| + |b|)), shape [4, N].
    rise_N, below_N, above_N, whole_N = sizes
    turns_N = 4 * ROUNDOFF * (16 + np.abs(log_a_N) + np.abs(x_N))
    below_N, whole_N = below_N + turns_N, whole_N + turns_N
    size_N = log_a_N.real
    with np.errstate(over="ignore", invalid="ignore"):
        small_N = np.exp(size_N + below_N + rise_N) * np.expm1(above_N)
        small_N += np.exp(size_N) * np.expm1(below_N) * np.expm1(rise_N)
        large_N = np.exp(size_N + rise_N + whole_N) * -np.expm1(-whole_N)
        large_N += np.exp(size_N + below_N) * -np.expm1(-below_N)
        value_N = np.where(x_N.real > 1, np.exp(log_a_N + x_N) - np.exp(log_a_N), np.exp(log_a_N) * np.expm1(x_N))
    return value_N, np.fmin(small_N, large_N)


def _log1p(z_N: Complex) -> Complex:
    """Return log(1 + z) with its relative precision for small z."""
    small_N = np.abs(z_N) < 0.5
    near_N = np.log1p(np.where(small_N, 2 * z_N.real + np.abs(z_N) ** 2, 0.0)) / 2
    real_N = np.where(small_N, near_N, np.log(np.maximum(np.abs(1 + z_N), 1e-300)))
    return np.asarray(real_N + 1j * np.arctan2(z_N.imag, 1 + z_N.real), dtype=np.complex128)


def _transform(loss_J: Array, weight_J: Array, step: float, nodes: int) -> Complex:
    """Return Σ_j w_j e^{i t l_j} at t = 0, step, …: t = (a + b·n)·step, so one matrix product does it."""
    inner = math.isqrt(nodes - 1) + 1
    outer = -(-nodes // inner)
    turn_J = np.exp(1j * step * loss_J)
    far_J = np.exp(1j * (step * inner) * loss_J)
    near_AJ = _powers(turn_J, inner)
    far_BJ = _powers(far_J, outer)
    far_BJ *= weight_J
    return (far_BJ @ near_AJ.T).ravel()[:nodes]


def _powers(base_J: Complex, count: int) -> Complex:
    """Return base^0, …, base^(count - 1), shape [count, J]."""
    table = np.empty((count, base_J.size), dtype=np.complex128)
    table[0] = 1
    filled = 1
    while filled < count:
        more = min(filled, count - filled)
        np.multiply(
            table[:more], base_J if filled == 1 else table[filled - 1] * base_J, out=table[filled : filled + more]
        )
        filled += more
    return table


@dataclass(frozen=True)
class TailCut:
    """Outcomes with all losses at most `loss`, bounded separately by Chernoff's inequality at `c`."""

    loss: float
    c: float


@dataclass(frozen=True)
class Nodes:
    """Contour of the integral, and its nodes."""

    c: float  # real part of the contour
    smoothing: float  # v, the variance of the added Gaussian losses
    period: float  # W
    count: int  # number of nodes with t ≥ 0
    cut: TailCut | None = None  # outcomes that are bounded separately; None where none need be

    @property
    def step(self) -> float:
        """Distance of two nodes."""
        return 2 * math.pi / self.period


class Contour:
    """Certified bounds of δ(ε) around one ε."""

    def __init__(self, composition: Composition, nodes: Nodes) -> None:
        self._composition, self._nodes = composition, nodes
        c, variance = nodes.c, nodes.smoothing + composition.gaussian
        self.t_N = nodes.step * np.arange(nodes.count)
        s_N = c + 1j * self.t_N
        smooth_N: Complex = np.asarray(variance / 2 * ((2 * c + 1) * 1j * self.t_N - self.t_N**2), dtype=np.complex128)
        self._log_below = -math.inf if nodes.cut is None else composition.log_below(nodes.cut.c, nodes.cut.loss)
        value_N, error_N, most = self._integrand(smooth_N)
        scale_N = np.full(nodes.count, nodes.step / math.pi)
        scale_N[0] /= 2
        part_N: Complex = np.asarray(value_N * scale_N, dtype=np.complex128)
        self._density_N = part_N
        self._delta_N: Complex = np.asarray(part_N / (s_N * (s_N + 1)), dtype=np.complex128)
        rounding_N = error_N * scale_N
        last = float(self.t_N[-1])
        beyond = most * math.exp(-variance * last**2 / 2) / (variance * last) / math.pi if variance > 0 else math.inf
        self._density_error = float(rounding_N.sum()) + beyond
        self._delta_error = float((rounding_N / np.abs(s_N * (s_N + 1))).sum()) + beyond / last**2
        self._log_moment = composition.log_moment(c)[0] + nodes.smoothing * (c * c + c) / 2
        self._moment_error = composition.moment_error(c) + 4 * ROUNDOFF * nodes.smoothing * (c * c + c)

    def _integrand(self, smooth_N: Complex) -> tuple[Complex, Array, float]:
        """Return M(c + it) / M(c) at the nodes, without outcomes below the cut, its error bound and largest size."""
        nodes = self._nodes
        if nodes.cut is None:
            log_N, unsure_N = self._composition.along(nodes.c, nodes.step, nodes.count)
            log_N = log_N + smooth_N
            # Angles of many turns are known only to their own precision.
            unsure_N = unsure_N + 4 * ROUNDOFF * (16 + np.abs(log_N))
            with np.errstate(over="ignore"):
                return np.exp(log_N), np.exp(log_N.real + unsure_N) * -np.expm1(-unsure_N), 1.0
        value_N, error_N = self._composition.along_above(nodes.c, nodes.step, nodes.count, nodes.cut.loss)
        most = float(np.abs(value_N[0]) + error_N[0])
        error_N = np.exp(smooth_N.real) * (error_N + np.abs(value_N) * 8 * ROUNDOFF * (16 + np.abs(smooth_N)))
        return value_N * np.exp(smooth_N), error_N, most

    def upper(self, epsilon: float) -> float:
        """Return an upper bound of the composition's δ(ε)."""
        exponent, error, turn_N = self._at(epsilon)
        scale = math.exp(min(max(exponent + error, -700.0), 700.0))
        value = float((self._delta_N * turn_N).real.sum()) + self._delta_error
        value = scale * (value + self._phase_error(self._delta_N, epsilon)) + self._below(epsilon)
        return min(1.0, self._composition.infinite + max(value, 0.0)) if not math.isnan(value) else 1.0

    def lower(self, epsilon: float) -> float:
        """Return a lower bound of the composition's δ(ε)."""
        exponent, error, turn_N = self._at(epsilon)
        if max(exponent, self._nodes.smoothing) > 700:
            return self._composition.infinite
        scale = math.exp(exponent - error)
        v = self._nodes.smoothing
        value = float((self._delta_N * turn_N).real.sum()) - self._delta_error
        value -= self._phase_error(self._delta_N, epsilon)
        density = float((self._density_N * turn_N).real.sum()) + self._density_error
        density += self._phase_error(self._density_N, epsilon)
        value = scale * (value - v * math.exp(v / 8) * max(density, 0.0)) - self._aliases(epsilon)
        return min(1.0, self._composition.infinite + max(value, 0.0)) if not math.isnan(value) else 0.0

    def bend(self, epsilon: float) -> float:
        """Return about δ''/|δ'| at ε, at least 1: twice the move of ε for each unit of variance that losses gain."""
        turn_N = self._at(epsilon)[2]
        density = float((self._density_N * turn_N).real.sum())
        slope = float((self._density_N / (self._nodes.c + 1 + 1j * self.t_N) * turn_N).real.sum())
        return max(1.0, density / slope) if slope > 0 else 1.0

    def _at(self, epsilon: float) -> tuple[float, float, Complex]:
        """Return the log of the sum's factor, its error bound, and each node's factor."""
        shift = self._nodes.c * epsilon
        error = self._moment_error + 4 * ROUNDOFF * (abs(self._log_moment) + abs(shift) + 1)
        return self._log_moment - shift, error, np.exp(-1j * epsilon * self.t_N)

    def _below(self, epsilon: float) -> float:
        """Bound what the outcomes below the cut add to δ."""
        cut = self._nodes.cut
        return 0.0 if cut is None else math.exp(min(self._log_below - cut.c * epsilon * (1 - 1e-12), 0.0))

    def _phase_error(self, sum_N: Complex, epsilon: float) -> float:
        """Bound what rounding of the angles tε changes."""
        angle_N = ROUNDOFF * 4 * (1 + abs(epsilon) * self.t_N)
        return float((np.abs(sum_N) * angle_N).sum())

    def _aliases(self, epsilon: float) -> float:
        """Bound Σ_{k≠0} e^{ckW} δ(ε + kW)."""
        c, period = self._nodes.c, self._nodes.period
        total = math.exp(_log_mass(self._composition, self._nodes.cut)) / math.expm1(min(c * period, 700.0))
        return total + min(
            _geometric(log_chernoff(self._composition, self._nodes.smoothing, far, epsilon), (far - c) * period)
            for far in (FURTHER * c).tolist()
        )


def _log_mass(composition: Composition, cut: TailCut | None) -> float:
    """Bound log of the probability of all outcomes that are integrated over."""
    return 0.0 if cut is None else min(0.0, composition.log_above(0.0, cut.loss) + 1e-6)


def _geometric(log_first: float, decay: float) -> float:
    """Return Σ_{k≥1} e^{log_first - k·decay}, at most e^700."""
    log_sum = log_first - decay - math.log(-math.expm1(-decay)) if decay > 0 else math.inf
    return math.exp(min(log_sum, 700.0))


FURTHER: Array = np.array([1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 5.0, 8.0])
"""Multiples of c at which Chernoff's inequality is tried."""


def log_chernoff(composition: Composition, smoothing: float, c: float, epsilon: float) -> float:
    """Return log of M(c)·e^{-cε}·max_u e^{-cu}(1 - e^{-u}), which is at least δ(ε), rounded upwards."""
    value = composition.log_moment(c)[0] + smoothing * (c * c + c) / 2
    # The maximum is at u = log(1 + 1/c); c·log c - (1 + c)·log(1 + c) would cancel for large c.
    size = abs(value) + abs(c * epsilon) + math.log1p(c) + 2
    error = composition.moment_error(c) + 8 * ROUNDOFF * (size + smoothing * (c * c + c))
    return value - c * epsilon - c * math.log1p(1 / c) - math.log1p(c) + error


def chosen_nodes(
    composition: Composition, *, c: float, smoothing: float, epsilon: float, delta: float, cut: TailCut | None = None
) -> Nodes:
    """Return a contour fine enough for δ near `delta` at ε."""
    # More smoothing is taken where `smoothing` would need more than `MOST_NODES`; aliases stay below 1e-5 of `delta`.
    allowed = math.log(delta) - 12
    period = max(0.0, (_log_mass(composition, cut) - allowed) / c)
    wanted = min(
        max(0.0, log_chernoff(composition, smoothing, far, epsilon) - allowed) / (far - c)
        for far in (FURTHER * c).tolist()
    )
    period = float(max(period, wanted))
    needed = 2 * DECAY * (period / (2 * math.pi * MOST_NODES)) ** 2
    if smoothing + composition.gaussian < needed:
        smoothing = needed
    reach = math.sqrt(2 * DECAY / (smoothing + composition.gaussian))
    return Nodes(c, smoothing, period, max(16, math.ceil(reach * period / (2 * math.pi)) + 2), cut)
