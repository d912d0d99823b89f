"""`audit_scores`: from scores to a finding, by the method that fits how the scores came about.

Many runs: the rows must be independent, one row per *run* of the mechanism; thresholds have confidence bounds that hold
although they were chosen from the scores. One run: many canaries, each included by a fair coin of its own, share the
training, so their scores are not independent; what is bounded is how many coins an attack can guess at all.

A claim is a trade-off curve, the least false negative rate that any test can have at a false positive rate. A mechanism
is f-DP if for every event S and neighbouring data P(S) ≤ F(P'(S)), where F(y) = 1 - f(y). What the audits need is the
inverse of F: how probable an event must be without the record, if it has probability r with it.

Scores come in files, which `CanaryRecorder` writes from a training script.
"""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

from ghostclip import _validate
from ghostclip._validate import positive_int, refuse_any
from ghostclip.errors import DataError, InvalidOptionError

MEMBER_COLUMNS = ("included", "member")
_YES, _NO = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no"}
_LEAST = 2


@dataclass(frozen=True)
class Scores:
    """One score per canary (or per run) and whether it was included; the higher, the more the attack thinks it was."""

    score_M: Array  # finite or infinite, never NaN
    included_M: NDArray[np.bool_]

    @classmethod
    def of(cls, score: ArrayLike, included: ArrayLike) -> Scores:
        """Return checked scores and inclusions, shape [M] each, the latter booleans or zeros and ones."""
        score_M, member_M = np.asarray(score, dtype=np.float64), np.asarray(included)
        missing, members = int(np.isnan(score_M).sum()), int(np.count_nonzero(member_M == 1))
        refuse_any(
            (score_M.ndim != 1 or score_M.shape != member_M.shape,
             f"scores of shape {score_M.shape}, inclusions of shape {member_M.shape}: one each, in a row."),
            (member_M.dtype != np.bool_ and not np.isin(member_M, (0, 1)).all(),
             "inclusions: expected booleans, or zeros and ones."),
            (missing > 0,
             f"{missing} of {score_M.size} scores are NaN: an audit would depend on what they stand for."),
            (min(members, score_M.size - members) < _LEAST,
             f"{members} of {score_M.size} were included: at least {_LEAST} must be, and {_LEAST} must not."),
            error=DataError,
        )  # fmt: skip
        return cls(score_M, member_M.astype(np.bool_))

    @property
    def member(self) -> Array:
        """Scores of what was included, ascending."""
        return np.sort(self.score_M[self.included_M])

    @property
    def other(self) -> Array:
        """Scores of what was left out, ascending."""
        return np.sort(self.score_M[~self.included_M])

    def __len__(self) -> int:
        return self.score_M.size

    def negated(self) -> Scores:
        """Return the scores for an attack in which lower means included, as for losses."""
        return Scores(-self.score_M, self.included_M)


def load_scores(path: str | Path) -> Scores:
    """Read scores from a `.csv` with a header, a `.json` (records, or lists by column) or an `.npz`."""
    # Columns "score", and "included" or "member" (true/false, yes/no, 1/0).
    path = Path(path)
    if path.suffix.lower() not in (".csv", ".json", ".npz"):
        raise DataError(f"{path}: expected a file named .csv, .json or .npz.")
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    try:
        columns, lines = _columns(path)
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: not readable as {path.suffix} ({error}).") from error
    member = next((name for name in MEMBER_COLUMNS if name in columns), None)
    if "score" not in columns or member is None:
        raise DataError(f"{path}: columns {', '.join(columns) or 'none'}; wanted 'score', and 'included' or 'member'.")

    def read(name: str, read_one: Callable[[object], float | None], wanted: str) -> list[float]:
        parsed = [read_one(value) for value in columns[name]]
        if None in parsed:
            row = parsed.index(None)
            location = f"line {lines[row]}" if lines else f"record {row + 1}"
            raise DataError(f"{path}, {location}, column {name!r}: {columns[name][row]!r} is not {wanted}.")
        return [value for value in parsed if value is not None]

    scores = read("score", _number, "a number")
    included = read(member, _truth, "true or false, yes or no, 1 or 0")
    try:
        return Scores.of(scores, included)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _truth(value: object) -> bool | None:
    text = str(value).strip().lower()
    return text in _YES if text in _YES | _NO else None


def _columns(path: Path) -> tuple[Mapping[str, Sequence[object]], list[int]]:
    """Return the columns of a file, and of a table the line of each row."""
    lines: list[int] = []
    if path.suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name].reshape(-1).tolist() for name in arrays.files}, lines
    if path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            numbered = [(row, reader.line_num) for row in reader]
            rows, lines = [row for row, _ in numbered], [line for _, line in numbered]
    else:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(rows, dict):
            return {name: value for name, value in rows.items() if isinstance(value, list)}, lines
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{path}: expected a list of records, or an object with a list per column.")
    return {name: [row.get(name) for row in rows] for name in (rows[0] if rows else ())}, lines


class CanaryRecorder:
    """Keeps one score per canary beside the coin that included it or left it out.

    A score says how much the trained model seems to know the canary; the higher, the more. Minus the canary's loss is a
    good one, the loss before training minus the loss after it a better one.

    Example:
        >>> from ghostclip.audit import CanaryDataset, CanaryRecorder, flip_coins
        >>> included = flip_coins(len(canaries))
        >>> data = CanaryDataset(train_data, canaries, included)
        >>> recorder = CanaryRecorder(included)
        >>> # train privately on `data`; then, with the losses of all canaries:
        >>> recorder.record(-losses_of_canaries)
        >>> recorder.save(folder / "scores.csv")

    Then ``ghostclip audit scores.csv --delta 1e-5 --claimed-epsilon 3``.

    Privacy:
        The file tells which canaries took part. That is the auditor's own knowledge, and nothing about other records
        that the model does not tell already through the canaries' scores.

    Args:
        included: Coins, shape [m], as `flip_coins` returns them.
    """

    def __init__(self, included: Sequence[bool] | NDArray[np.bool_]) -> None:
        self.included = np.asarray(included, dtype=bool)
        self._score_M = np.full(self.included.shape, np.nan)

    def record(self, scores: ArrayLike, *, canaries: Sequence[int] | None = None) -> None:
        """Set scores, replacing earlier ones.

        Args:
            scores: Numbers (a CPU or GPU tensor, too), one per canary named.
            canaries: Which canaries they belong to; all by default.

        Raises:
            DataError: If there are not as many scores as canaries, or no such canary.
        """
        detach = getattr(scores, "detach", None)
        values = np.asarray(scores if detach is None else detach().double().cpu(), dtype=np.float64).reshape(-1)
        where = np.arange(self.included.size) if canaries is None else np.asarray(canaries, dtype=np.int64)
        if where.shape != values.shape:
            raise DataError(f"{values.size} scores for {where.size} canaries: one each.")
        if where.size and not (where.min() >= 0 and where.max() < self.included.size):
            raise DataError(f"canaries {where.min()} to {where.max()}: there are {self.included.size}, counted from 0.")
        self._score_M[where] = values

    def scores(self) -> Scores:
        """Return the scores recorded.

        Returns:
            Scores for `audit_scores`.

        Raises:
            DataError: If a canary has no score, or the scores cannot be audited.
        """
        missing = np.flatnonzero(np.isnan(self._score_M))
        if missing.size:
            raise DataError(f"{missing.size} canaries have no score (the first is number {missing[0]}).")
        return Scores.of(self._score_M, self.included)

    def save(self, path: str | Path) -> None:
        """Write the scores.

        Args:
            path: `.csv`, `.json` or `.npz`; replaced if it exists.

        Raises:
            DataError: If a score is missing, or the file has another name.
        """
        path, scores = Path(path), self.scores()
        rows = list(zip(scores.score_M.tolist(), scores.included_M.tolist(), strict=True))
        if path.suffix == ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("score", "included"), *((repr(s), int(i)) for s, i in rows)])
        elif path.suffix == ".json":
            text = json.dumps([{"score": s, "included": i} for s, i in rows], indent=1)
            path.write_text(text + "\n", encoding="utf-8")
        elif path.suffix == ".npz":
            np.savez(path, score=scores.score_M, included=scores.included_M)
        else:
            raise DataError(f"{path}: expected a name that ends in .csv, .json or .npz.")


Array = NDArray[np.float64]

_SAFE_EXPONENT = 700.0


Least = Callable[[ArrayLike], Array]
"""F⁻¹ of a claim: the least probability without the record of an event that has probability r with it."""


def gaussian_least(probability: ArrayLike, *, mu: float) -> Array:
    """Return F⁻¹(r) = Φ(Φ⁻¹(r) - μ) of μ-GDP: N(0, 1) against N(μ, 1), F(y) = Φ(Φ⁻¹(y) + μ).

    Reference:
        Dong, Roth, Su 2022, Definition 3.
    """
    return np.asarray(special.ndtr(special.ndtri(np.clip(probability, 0.0, 1.0)) - mu))


def approximate_least(probability: ArrayLike, *, epsilon: float, delta: float) -> Array:
    """Return F⁻¹(r) = max(0, e^-ε·(r - δ), 1 - δ - e^ε·(1 - r)) of (ε, δ)-DP.

    There F(y) = min(δ + e^ε·y, 1 - e^-ε·(1 - δ - y), 1).

    Reference:
        Wasserman, Zhou 2010; Dong, Roth, Su 2022, Proposition 4.
    """
    r, epsilon = np.clip(probability, 0.0, 1.0), min(epsilon, _SAFE_EXPONENT)
    steep = math.exp(-epsilon) * (r - delta)
    flat = 1 - delta - math.exp(epsilon) * (1 - r)
    return np.maximum(0.0, np.maximum(steep, flat))


def gaussian_delta(epsilon: float, *, mu: float) -> float:
    """Return the smallest δ of a μ-GDP mechanism: Φ(-ε/μ + μ/2) - e^ε·Φ(-ε/μ - μ/2).

    Reference:
        Balle, Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 1.
    """
    if mu <= 0:
        return 0.0
    first, second = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
    # In logarithms: e^ε alone would overflow where the product is harmless.
    return max(0.0, float(special.ndtr(first) - math.exp(min(0.0, epsilon + special.log_ndtr(second)))))


def gaussian_epsilon(mu: float, *, delta: float) -> float:
    """Return the smallest ε of a μ-GDP mechanism at δ."""
    if gaussian_delta(0.0, mu=mu) <= delta:
        return 0.0
    if math.isinf(mu):
        return math.inf
    highest = 1.0
    while gaussian_delta(highest, mu=mu) > delta:
        highest *= 2
    return float(optimize.brentq(lambda epsilon: gaussian_delta(epsilon, mu=mu) - delta, 0.0, highest, xtol=1e-12))


_RANK_STEP = 4


def clopper_pearson_upper(count: ArrayLike, total: int, alpha: float) -> Array:
    """Return the one-sided upper bound: the p at which so small a count has probability α.

    It is the 1 - α quantile of Beta(k + 1, n - k), and 1 for k = n. It never fails with a probability above α, whatever
    the true p and however few trials.

    Reference:
        Clopper, Pearson 1934.
    """
    count = np.asarray(count, dtype=np.float64)
    inside = np.minimum(count, total - 1.0)
    bound = special.betaincinv(inside + 1, total - inside, 1 - alpha)
    return np.where(count >= total, 1.0, bound)


@dataclass(frozen=True)
class OperatingPoint:
    """The test "included if the score is high enough", with upper confidence bounds on both of its error rates."""

    threshold: float  # scores above it (or at it, for those taken from members) are called included
    fpr: float  # share of what was left out that is called included
    fnr: float  # share of what was included that is not
    fpr_upper: float
    fnr_upper: float

    def epsilon(self, *, delta: float) -> float:
        """Return the ε below which these error rates are impossible: log((1 - fnr - δ)/fpr), or with both exchanged.

        Reference:
            Kairouz, Oh, Viswanath 2015, Theorem 2.1; Jagielski, Ullman, Oprea 2020, Section 4.
        """
        rates = np.asarray([self.fpr_upper, self.fnr_upper])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.log(np.maximum(1 - rates[::-1] - delta, 0.0) / rates).max().clip(0.0))

    def mu(self) -> float:
        """Return the μ below which these error rates are impossible for a Gaussian mechanism: Φ⁻¹(1-fpr) - Φ⁻¹(fnr).

        Reference:
            Dong, Roth, Su 2022, Equation (6); Nasr et al. 2023, Section 4.2.
        """
        return max(0.0, float(-special.ndtri(self.fpr_upper) - special.ndtri(self.fnr_upper)))


def union_points(scores: Scores, *, alpha: float) -> list[OperatingPoint]:
    """Return points whose bounds all hold at once, from every score, with thresholds at ranks fixed in advance.

    The threshold is the j-th smallest score of one side. The probability of that side beyond it is at most
    Beta-distributed, which is Clopper-Pearson's bound again, exact although the threshold is random; and for the other
    side, which is independent of it, the threshold is as good as fixed. Every point takes an equal share of α.
    """
    other, member = scores.other, scores.member
    others, members = _ranks(other.size), _ranks(member.size)
    share = alpha / (len(others) + len(members))
    points = [_point(float(other[-1 - beyond]), scores, share, beyond=beyond) for beyond in others]
    return points + [_point(float(member[below]), scores, share, below=below) for below in members]


def _ranks(total: int) -> list[int]:
    """Return the number of scores beyond the threshold: none, then 1, 4, 16, ... up to half of them."""
    powers = int(math.log(max(1, total // 2), _RANK_STEP) + 1e-9)
    return [0, *(_RANK_STEP**power for power in range(powers + 1))]


def _point(
    threshold: float, scores: Scores, alpha: float, *, beyond: int | None = None, below: int | None = None
) -> OperatingPoint:
    """Return the test "above the threshold", or, where that is a member's score, "that score or better"."""
    # `beyond`, `below`: how many of the others, or of the members, lie on the wrong side, where their rank says it.
    other, member = scores.other, scores.member
    fp = other.size - int(np.searchsorted(other, threshold, side="left")) if beyond is None else beyond
    fn = int(np.searchsorted(member, threshold, side="right")) if below is None else below
    return OperatingPoint(
        threshold=threshold,
        fpr=fp / other.size,
        fnr=fn / member.size,
        fpr_upper=float(clopper_pearson_upper(fp, other.size, alpha / 2)),
        fnr_upper=float(clopper_pearson_upper(fn, member.size, alpha / 2)),
    )


_TIES_SEED = 0
_FEWEST_GUESSES = 16
_DEVIATIONS = 6
_STEPS = 10**6
_HIGHEST_EPSILON, _HIGHEST_MU = 30.0, 15.0


@dataclass(frozen=True)
class Guesses:
    """An attack's guesses about coins."""

    canaries: int  # m, all of them
    made: int  # r, guesses; the attack abstains on the others
    correct: int  # v, right guesses


def make_guesses(scores: Scores, *, made: int) -> Guesses:
    """Guess "included" for the highest scores and "left out" for the lowest, half of the guesses each."""
    # The number of guesses is fixed before the scores are seen, or paid for (see `audit_scores`).
    made = positive_int(made, "guesses")
    if made > len(scores):
        raise InvalidOptionError(f"guesses={made}: there are only {len(scores)} canaries.")
    # Equal scores in random order: the order of the rows may tell who was included.
    shuffled = np.random.default_rng(_TIES_SEED).permutation(len(scores))
    order = shuffled[np.argsort(scores.score_M[shuffled], kind="stable")]
    out, top = made // 2, made - made // 2
    right = int(scores.included_M[order[-top:]].sum()) + int((~scores.included_M[order[:out]]).sum())
    return Guesses(canaries=len(scores), made=made, correct=right)


def approximate_dp_p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """Return the largest probability, over all (ε, δ)-DP mechanisms and attacks, of guessing so many coins.

        β + 2mδ·max_i (1/i)·P[v > W ≥ v - i],   β = P[W ≥ v],   W ~ Binomial(r, e^ε/(1 + e^ε))

    Reference:
        Steinke, Nasr, Jagielski 2023, Theorem 5.2.
    """
    right = float(1 / (1 + np.exp(-epsilon)))
    beta = float(stats.binom.sf(guesses.correct - 1, guesses.made, right))
    if delta == 0 or guesses.correct == 0:
        return min(1.0, beta)
    below = stats.binom.pmf(np.arange(guesses.correct - 1, -1, -1), guesses.made, right)
    slope = float((np.cumsum(below) / np.arange(1, guesses.correct + 1)).max())
    return min(1.0, beta + 2 * guesses.canaries * delta * slope)


def contradicts_f_dp(guesses: Guesses, least: Least, *, alpha: float) -> bool:
    """Whether no f-DP mechanism lets an attack guess so many coins with a probability above α.

    Let p_i be the probability of exactly i right guesses, r_c = Σ_{i≥c} (i/m)·p_i and h_c = Σ_{i≥c} ((r-i)/m)·p_i: the
    probabilities that a random canary is guessed right, or wrong, and at least c (others and it) are right. Turning
    that canary's coin over makes the one event the other, so f-DP demands r_{c+1} ≤ F(h_c). From P[V ≥ v] = α, all of
    it at v, which asks for least, the demands are followed down to c = 0, where r_0 + h_0 = r/m must hold.

    Cost:
        v evaluations of the curve.

    Reference:
        Mahloujifar, Melis, Chaudhuri 2025, the recursion on r and h.
    """
    m, made, v = guesses.canaries, guesses.made, guesses.correct
    right, wrong = alpha * v / m, alpha * (made - v) / m
    for i in range(v - 1, -1, -1):
        demanded = max(wrong, float(least(right)))
        # Beyond 1 it is settled already; capped so that nothing overflows on the way down.
        right = min(right + i / (made - i) * (demanded - wrong), 2.0)
        wrong = demanded
    return right + wrong > made / m * (1 + 1e-12)


def guesses_of(scores: Scores, made: int | None) -> list[Guesses]:
    """Return guesses about the coins of canaries, as many as asked for, or all, half of them, ..., a sixteenth."""
    # Each is to be paid for. Coins that are plainly not fair are refused: every one-run bound would be too high.
    canaries, included = len(scores), int(scores.included_M.sum())
    if abs(included - canaries / 2) > _DEVIATIONS * (canaries / 4) ** 0.5:
        raise DataError(
            f"{included} of {canaries} canaries were included: the one-run methods need a fair coin for each "
            "(ghostclip.audit.flip_coins)."
        )
    if made is not None:
        return [make_guesses(scores, made=made)]
    counts = [n for n in (canaries // 2**power for power in range(5)) if n >= min(_FEWEST_GUESSES, canaries)]
    return [make_guesses(scores, made=count) for count in counts]


def epsilon_of_guesses(guesses: Guesses, *, method: str, delta: float, alpha: float) -> tuple[float, float | None]:
    """Return the ε up to which every claim is rejected at level ``alpha``, and μ for the Gaussian method."""
    if method == "one-run-gaussian":
        mu = _most_rejected(
            lambda mu: contradicts_f_dp(guesses, partial(gaussian_least, mu=mu), alpha=alpha), _HIGHEST_MU
        )
        return gaussian_epsilon(mu, delta=delta), mu

    def rejected(epsilon: float) -> bool:
        if method == "one-run":
            return approximate_dp_p_value(guesses, epsilon=epsilon, delta=delta) <= alpha
        return contradicts_f_dp(guesses, partial(approximate_least, epsilon=epsilon, delta=delta), alpha=alpha)

    return _most_rejected(rejected, _HIGHEST_EPSILON), None


def _most_rejected(rejected: Callable[[float], bool], highest: float) -> float:
    """Return the largest value that is rejected, at most the highest, in millionths of it; 0 where none is."""
    step = highest / _STEPS
    return step * max(0, bisect_left(range(_STEPS + 1), True, key=lambda number: not rejected(number * step)) - 1)


_ABOUT = {
    "one-run": "canaries of one run, included by coin",
    "one-run-f-dp": "canaries of one run, included by coin; trade-off curve of (epsilon, delta)-DP",
    "one-run-gaussian": "canaries of one run, included by coin; converted as if the trade-off curve were Gaussian",
    "clopper-pearson": "independent runs; exact bounds on both error rates",
    "gaussian": "independent runs; exact bounds on both error rates, converted as if the trade-off curve were Gaussian",
}
METHODS: Final = tuple(_ABOUT)
"""The first three for canaries of one training, the last two for scores of independent runs."""


@dataclass(frozen=True)
class Finding:
    """A lower bound on ε with its method and measurements."""

    epsilon: float  # lower bound on ε at `delta`; 0 when nothing was proved
    delta: float
    confidence: float  # probability with which the bound is right, over the mechanism's and the attack's randomness
    method: str  # how it was found
    included: int  # rows that were included
    left_out: int  # rows that were not
    mu: float | None = None  # lower bound on μ of Gaussian DP, for the Gaussian methods
    threshold: float | None = None  # score at which the attack decides, for independent runs
    fpr: float | None = None  # measured false positive rate there
    fnr: float | None = None  # measured false negative rate there
    guesses: int | None = None  # guesses the attack made, for one run
    correct: int | None = None  # right ones among them
    claimed_epsilon: float | None = None

    @property
    def contradicts(self) -> bool:
        """Whether the bound exceeds the claim."""
        return self.claimed_epsilon is not None and self.epsilon > self.claimed_epsilon

    def sentence(self) -> str:
        """Return the result, and what it says about the claim, in one line."""
        bound = f"epsilon >= {self.epsilon:.3f} at delta = {self.delta:g} with {100 * self.confidence:g} % confidence"
        if self.claimed_epsilon is None:
            return f"{bound} ({self.method})."
        claim = f"the claim epsilon <= {self.claimed_epsilon:g}"
        if self.contradicts:
            return f"{bound} ({self.method}): {claim} is contradicted."
        return f"{bound} ({self.method}): {claim} is not contradicted, which does not prove it."

    def basis(self) -> str:
        """Return what the bound assumes and what was measured, in one line."""
        measured = ""
        if self.guesses is not None:
            measured = f"; {self.correct} of {self.guesses} guesses right"
        elif self.fpr is not None:
            measured = f"; at score {self.threshold:.6g} false positives {self.fpr:.4f}, false negatives {self.fnr:.4f}"
        return f"{self.included} included, {self.left_out} left out; {_ABOUT[self.method]}{measured}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without what does not apply."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {**values, "contradicts": self.contradicts, "sentence": self.sentence()}


def audit_scores(
    scores: Scores,
    *,
    delta: float,
    confidence: float = 0.95,
    method: str = "one-run",
    guesses: int | None = None,
    claimed_epsilon: float | None = None,
) -> Finding:
    """Return the lower bound on ε that an attack's scores prove.

    - "one-run": m canaries of one training, each included by a fair coin; Steinke, Nasr, Jagielski 2023.
    - "one-run-f-dp": the same, bounded through the trade-off curve of (ε, δ)-DP; Mahloujifar et al. 2025.
    - "one-run-gaussian": the same with Gaussian curves; tighter, but it takes the mechanism for a Gaussian one.
    - "clopper-pearson": one row per independent run of the mechanism; Jagielski, Ullman, Oprea 2020.
    - "gaussian": the same, fitted to Gaussian DP; Nasr et al. 2023. It needs far fewer runs, and takes the mechanism
      for a Gaussian one: one full-batch step is; a subsampled training is only about one.

    Privacy:
        Scores are functions of the canaries and the training; whether canaries are secret is the auditor's matter.

    Args:
        scores: The attack's scores.
        delta: δ that ε is meant at.
        confidence: Probability with which the bound is right.
        method: One of `METHODS`.
        guesses: How many guesses the attack makes, for one run; None tries all canaries, half of them, ..., a
            sixteenth, each at its share of the error probability.
        claimed_epsilon: A claim to compare with.

    Returns:
        The finding.

    Raises:
        InvalidOptionError: If an option is unknown or out of range.
        DataError: If there are too few scores, or the coins of one run were plainly not fair.
    """
    _validate.choice(method, "method", METHODS)
    _validate.probability(delta, "delta")
    alpha = 1 - _validate.probability(confidence, "confidence")
    if claimed_epsilon is not None:
        _validate.non_negative(claimed_epsilon, "claimed_epsilon")
    if method.startswith("one-run"):
        bounds = _by_guesses(scores, delta, alpha, method, guesses)
    elif guesses is None:
        bounds = _by_points(scores, delta, alpha, gaussian=method == "gaussian")
    else:
        raise InvalidOptionError(f"guesses={guesses}: method={method!r} makes none; leave it out.")
    best = max(bounds, key=lambda values: values["epsilon"])
    members = int(scores.included_M.sum())
    return Finding(
        delta=delta, confidence=1 - alpha, method=method, included=members, left_out=len(scores) - members,
        claimed_epsilon=claimed_epsilon, **best,
    )  # fmt: skip


def _by_points(scores: Scores, delta: float, alpha: float, *, gaussian: bool) -> Iterator[dict[str, Any]]:
    for point in union_points(scores, alpha=alpha):
        mu = point.mu() if gaussian else None
        epsilon = point.epsilon(delta=delta) if mu is None else gaussian_epsilon(mu, delta=delta)
        yield {"epsilon": epsilon, "mu": mu, "threshold": point.threshold, "fpr": point.fpr, "fnr": point.fnr}


def _by_guesses(
    scores: Scores, delta: float, alpha: float, method: str, guesses: int | None
) -> Iterator[dict[str, Any]]:
    tried = guesses_of(scores, guesses)
    for made in tried:
        epsilon, mu = epsilon_of_guesses(made, method=method, delta=delta, alpha=alpha / len(tried))
        yield {"epsilon": epsilon, "mu": mu, "guesses": made.made, "correct": made.correct}
