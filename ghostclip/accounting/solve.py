"""ε for δ between certified bounds: saddle point first, contour there, finer until the bounds meet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ghostclip.accounting.contour import Composition, Contour, TailCut, chosen_nodes, log_chernoff
from ghostclip.accounting.pairs import Cells

TOLERANCE = 1e-4
"""Bounds are refined until they meet within this share of ε."""

MOST_REFINEMENTS = 4
MOST_APPROACHES = 12
MOST_CUT = 32
"""Distinct steps up to which outcomes of small losses are bounded apart."""

USUAL_SIZE = 4.0
"""Logarithm of the integrand over δ that it has at a saddle point of a distribution without such a heap at 0."""

MOST_SMOOTHING = 2.0
"""More would loosen the lower bound, which carries e^{v/8}, for nothing: ε is in the thousands there."""

LEAST_C, LARGEST_C = 1e-12, 1e12


@dataclass(frozen=True)
class Bounds:
    """Lower and upper bound of a quantity.

    Attributes:
        lower: It is not smaller.
        upper: It is not larger.
    """

    lower: float
    upper: float

    def worst_of(self, other: Bounds) -> Bounds:
        """Return the bounds of the larger of two quantities."""
        return Bounds(max(self.lower, other.lower), max(self.upper, other.upper))


Build = Callable[[str, str, Cells], Composition]
"""Makes the composition of a direction and a side ("upper" or "lower") from cells."""


@dataclass(frozen=True)
class _Spot:
    """Neighbourhood on the curve δ(ε) in which the work is done."""

    epsilon: float
    c: float  # real part of the contour
    bend: float  # δ''/|δ'| there: losses that gain a variance v move ε by bend·v/2
    cut: TailCut | None = None  # outcomes that are bounded separately


@dataclass(frozen=True)
class _Fineness:
    """Resolution of cells and smoothing."""

    width: float  # widest cell in z, in σ
    share: float  # by what share of ε one jump's cell, and smoothing, may move ε

    def refined(self, by: float) -> _Fineness:
        return _Fineness(self.width / by, self.share / by**2)

    def cells(self, spot: _Spot, reach: float) -> Cells:
        wanted = math.sqrt(12 * self.share * max(spot.epsilon, 1e-9) / spot.bend)
        # Rounded to powers of √2, so that the same cells are made, and found again, while a history grows.
        width = 2.0 ** (math.floor(2 * math.log2(min(max(wanted, 1e-9), 0.5))) / 2)
        centre = 2.0 ** (round(4 * math.log2(spot.epsilon)) / 4) if spot.epsilon > 0 else 0.0
        return Cells(self.width, width, centre, reach)

    def contour(self, composition: Composition, spot: _Spot, delta: float, *, slack: float = 5.0) -> Contour:
        smoothing = min(MOST_SMOOTHING, 2 * self.share * max(spot.epsilon, 1e-12) / spot.bend)
        if composition.gaussian >= smoothing:
            smoothing = 0.0
        # δ grows by e^slack at most on the way to there.
        lowest = max(0.0, spot.epsilon - slack / spot.c)
        nodes = chosen_nodes(composition, c=spot.c, smoothing=smoothing, epsilon=lowest, delta=delta, cut=spot.cut)
        return Contour(composition, nodes)


def epsilon_bounds(
    build: Build, directions: tuple[str, ...], *, delta: float, reach: float, width: float, tolerance: float = TOLERANCE
) -> Bounds:
    """Return bounds of the worst direction's ε at δ; the upper one is inf where steps reveal more than δ."""
    bounds = Bounds(0.0, 0.0)
    for direction in directions:
        if bounds.upper > 0 and _certainly_below(build, direction, bounds.upper, delta, reach, width):
            continue
        bounds = bounds.worst_of(_one_direction(build, direction, delta, reach, width, tolerance))
    return bounds


def _one_direction(build: Build, direction: str, delta: float, reach: float, width: float, tolerance: float) -> Bounds:
    coarse = build(direction, "upper", Cells(min(0.1, 2 * width), 0.02, 0.0, reach))
    if coarse.infinite >= delta:
        lower = build(direction, "lower", Cells(width, 0.02, 0.0, reach))
        most = coarse.largest_loss() if coarse.infinite == delta else math.inf
        return Bounds(math.inf if lower.infinite > delta else 0.0, most)
    if coarse.total_variation() <= delta:
        return Bounds(0.0, 0.0)
    fineness = _Fineness(width, 2e-5)
    spot, least = _approached(coarse, delta, fineness)
    best, gap = Bounds(0.0, least), math.inf
    for _ in range(MOST_REFINEMENTS):
        cells = fineness.cells(spot, reach)
        upper = build(direction, "upper", cells)
        best = Bounds(best.lower, min(best.upper, _certified_epsilon(upper, spot, delta, fineness, above=True)))
        if best.upper == 0:
            break
        lower = build(direction, "lower", cells)
        best = Bounds(max(best.lower, _certified_epsilon(lower, spot, delta, fineness, above=False)), best.upper)
        gap, before = best.upper - best.lower, gap
        if gap <= tolerance * best.upper or gap > 0.8 * before:
            break
        fineness = fineness.refined(min(4.0, max(1.5, 1.3 * math.sqrt(gap / (tolerance * best.upper)))))
    return best


def _approached(composition: Composition, delta: float, fineness: _Fineness) -> tuple[_Spot, float]:
    """Return the spot where δ(ε) = `delta`, and the least ε that a contour on the way has certified."""
    # By the saddle point approximation, then on contours until it stays.
    least = math.inf
    c, epsilon = saddle_for_delta(composition, delta)
    spot = _Spot(epsilon, c, c + 1) if epsilon == 0 else _spot_at(composition, epsilon, c + 1, delta)
    coarse = _Fineness(fineness.width, 50 * fineness.share)
    for _ in range(MOST_APPROACHES):
        contour = coarse.contour(composition, spot, delta - composition.infinite, slack=200.0)
        span = (spot.epsilon, _chernoff_epsilon(composition, spot.c, delta))
        epsilon = _crossing(contour.upper, span, delta, precision=1e-3)
        least = min(least, epsilon)
        moved = abs(epsilon - spot.epsilon) > 0.02 * epsilon
        spot = _spot_at(composition, epsilon, contour.bend(epsilon), delta)
        if not moved:
            break
    return spot, least


def _spot_at(composition: Composition, epsilon: float, bend: float, delta: float) -> _Spot:
    """Return the spot at an ε, with a cut where the integrand there is so large that its rounding would matter."""
    c = saddle_for_epsilon(composition, epsilon)
    plain = _Spot(epsilon, c, bend)
    size = composition.log_moment(c)[0] - c * epsilon - 2 * math.log1p(c)
    if epsilon == 0 or len(composition.pairs) > MOST_CUT or size - math.log(delta) < USUAL_SIZE:
        return plain
    cut = _cut_for(composition, epsilon / 2, math.log(delta) - 14)
    if cut is None:
        return plain

    def height(log_c: float) -> float:
        c = math.exp(log_c)
        return composition.log_above(c, cut.loss) - c * epsilon - log_c - math.log1p(c)

    return _Spot(epsilon, math.exp(_lowest(height, math.log(1e-3), math.log(1e4 / epsilon))), bend, cut)


def _cut_for(composition: Composition, epsilon: float, wanted: float) -> TailCut | None:
    """Return the largest cut with δ of the outcomes below it at most e^wanted from an ε on, or None."""
    for share in (0.5, 0.2, 0.1, 0.05, 0.02):
        cuts = [TailCut(share * epsilon, 2.0**power / epsilon) for power in range(2, 16)]
        best = min(cuts, key=lambda cut: composition.log_below(cut.c, cut.loss) - cut.c * epsilon)
        if composition.log_below(best.c, best.loss) - best.c * epsilon <= wanted:
            return best
    return None


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return about where a convex function is least."""
    share = (math.sqrt(5) - 1) / 2
    first, second = high - share * (high - low), low + share * (high - low)
    at_first, at_second = function(first), function(second)
    while high - low > 0.02:
        if at_first <= at_second:
            high, second, at_second = second, first, at_first
            first = high - share * (high - low)
            at_first = function(first)
        else:
            low, first, at_first = first, second, at_second
            second = low + share * (high - low)
            at_second = function(second)
    return (low + high) / 2


def saddle_for_delta(composition: Composition, delta: float) -> tuple[float, float]:
    """Return c and ε at which the saddle point approximation of δ(ε) is `delta`, good to a few percent."""
    left = delta - composition.infinite
    if left <= 0:
        return 1.0, 0.0
    target = math.log(left)

    def excess(log_c: float) -> float:
        c = math.exp(log_c)
        value, slope, bend = composition.log_moment(c)
        epsilon = slope - 1 / c - 1 / (c + 1)
        bend += c**-2 + (c + 1) ** -2
        return value - c * epsilon - math.log(c) - math.log1p(c) - math.log(2 * math.pi * bend) / 2 - target

    log_c = _falling_root(excess)
    c = math.exp(log_c)
    epsilon = composition.log_moment(c)[1] - 1 / c - 1 / (c + 1)
    if epsilon >= 0:
        return c, epsilon
    return saddle_for_epsilon(composition, 0.0), 0.0


def saddle_for_epsilon(composition: Composition, epsilon: float) -> float:
    """Return c where |M(s) e^{-sε} / (s(s+1))| is least on the positive axis."""

    def slope(log_c: float) -> float:
        c = math.exp(log_c)
        return epsilon - composition.log_moment(c)[1] + 1 / c + 1 / (c + 1)

    return math.exp(_falling_root(slope))


def _falling_root(function: Callable[[float], float]) -> float:
    """Return where a falling function of log c is 0, to a thousandth, or the end of the range that is closest."""
    side = 1.0 if function(0.0) > 0 else -1.0
    limit = math.log(LARGEST_C if side > 0 else LEAST_C)
    near, far = 0.0, side
    while (function(far) > 0) == (side > 0):
        if far == limit:
            return limit
        near, far = far, max(min(2 * far, limit), -abs(limit))
    low, high = min(near, far), max(near, far)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def _chernoff_epsilon(composition: Composition, c: float, delta: float) -> float:
    left = delta - composition.infinite
    return max(0.0, (log_chernoff(composition, 0.0, c, 0.0) - math.log(left)) / c) if left > 0 else math.inf


def _certified_epsilon(
    composition: Composition, spot: _Spot, delta: float, fineness: _Fineness, *, above: bool
) -> float:
    """Return an ε at which the certified δ is at most `delta`, or with ``above=False`` one at which it is at least."""
    if composition.infinite > delta or (above and composition.infinite == delta):
        return math.inf
    span = (spot.epsilon, _chernoff_epsilon(composition, spot.c, delta))
    if composition.is_single:
        return _crossing(lambda epsilon: composition.delta_of_single(epsilon)[above], span, delta, above=above)
    contour = fineness.contour(composition, spot, delta - composition.infinite)
    return _crossing(contour.upper if above else contour.lower, span, delta, above=above)


def _crossing(
    bound: Callable[[float], float],
    span: tuple[float, float],
    delta: float,
    *,
    above: bool = True,
    precision: float = 1e-7,
) -> float:
    """Return ε in [0, end] where a falling bound of δ crosses `delta`; span is (start, end)."""

    # `above`: return an end of the last interval at which the bound is at most δ (or the end), else one where it is at
    # least δ (or 0).
    def excess(epsilon: float) -> float:
        return math.log(max(bound(epsilon), 1e-320) / delta)

    (low, low_excess), (high, high_excess) = _bracket(excess, *span)
    if low_excess <= 0:
        return 0.0
    if high_excess > 0:
        return high if above else low
    for turn in range(200):
        if high - low <= precision * high:
            break
        share = low_excess / (low_excess - high_excess) if turn % 3 else 0.5
        middle = low + (high - low) * min(max(share, 1e-3), 1 - 1e-3)
        value = excess(middle)
        if value > 0:
            low, low_excess = middle, value
        else:
            high, high_excess = middle, value
    return high if above else low


def _bracket(
    excess: Callable[[float], float], start: float, end: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return two points around a crossing, each with its excess: steps of 0.1 %, then ever wider."""
    start = min(start, end)
    low = high = (start, excess(start))
    share = 1e-3
    while low[1] <= 0 and low[0] > 0:
        epsilon = low[0] - share * start if share < 1 else 0.0
        low, high, share = (max(epsilon, 0.0), excess(max(epsilon, 0.0))), low, 4 * share
    while high[1] > 0 and high[0] < end:
        epsilon = min(high[0] + share * max(start, 1e-3 * end), end)
        low, high, share = high, (epsilon, excess(epsilon)), 4 * share
    return low, high


def _certainly_below(build: Build, direction: str, epsilon: float, delta: float, reach: float, width: float) -> bool:
    """Return whether a direction's δ at ε is certainly at most `delta`."""
    coarse = build(direction, "upper", Cells(min(0.1, 2 * width), 0.02, 0.0, reach))
    if coarse.infinite >= delta:
        return False
    if math.isinf(epsilon):
        return True
    c = saddle_for_epsilon(coarse, epsilon)
    if coarse.infinite + math.exp(min(log_chernoff(coarse, 0.0, c, epsilon), 0.0)) <= delta:
        return True
    contour = _Fineness(width, 1e-3).contour(coarse, _Spot(epsilon, c, c + 1), delta - coarse.infinite)
    return contour.upper(epsilon) <= delta
