"""Mechanisms: sampling, noise and their cost as one object; a comparison of them for a budget; averages of iterates.

`PoissonSampling` is DP-SGD as usual. `BallsInBins` shows each record exactly once in each epoch, for less noise at the
same ε. `BandedInverse` lets each step take back noise of the steps before, at no memory. `BandedMatrixFactorization`
does so beside sampling, and `BufferedToeplitz` over all steps of long trainings, with buffers. `plan_privacy` compares.

A mechanism says how records are drawn, what noise a step adds, and what both cost together, in one frozen object.
`PrivacyEngine.make_private(mechanism=...)` takes its loader, its noise and its charges from here, so that they cannot
disagree; what nobody can account for cannot be built.

Lower triangular Toeplitz matrices of correlated noise: coefficients, sensitivity, and the error that is left.

A training of n steps that releases x_t + σ·s·(C⁻¹z)_t is one Gaussian mechanism with noise multiplier σ on the whole
stream x, where s is the sensitivity of C: the most that a record with gradients of norm 1 moves Cx by. What training
sees are sums of the releases, so the noise that matters is that of A·C⁻¹z with A the workload: the weights that a
gradient has in the parameters, all 1 (prefix sums), or as momentum and learning rates make them.

All matrices here are cascades of rational filters (`Section`), as noise is drawn by: C⁻¹ is one polynomial ("banded
inverse"), one over a polynomial (C is banded), or d factors (1 - λx) / (1 - μx) (buffered linear Toeplitz, BLT).

Reference: Denisov et al. (2022), arXiv:2202.08312; Choquette-Choo et al. (2023), arXiv:2306.08153; Kalinin and Lampert
(2024), arXiv:2405.13763 (square roots); Kalinin et al. (2025), arXiv:2505.12128 (banded inverses); Dvijotham et al.
(2024), arXiv:2404.16706, and McMahan et al. (2024), arXiv:2408.08868 (BLT).

Letters: T steps, p bands, d buffers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip._torch import copy_all_, move_all_
from ghostclip._validate import choice, fraction, positive, positive_int, probability, suggests_options
from ghostclip.accounting.calibration import bounding_accountant, smallest_noise_multiplier
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.accounting.pairs import Array
from ghostclip.data.schemes import Cyclic, CyclicPoisson, Poisson, RandomAllocation, SamplingScheme
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.noise.keyed import Correlation, Section


class AveragedWeights:
    """Average of a model's parameters over the steps of its optimizer: exponential, or of the last part of a training.

    Noise in each step moves iterates about their mean; an average of them is nearer to it, often by points of accuracy,
    and is a function of what was released: (ε, δ) stays what it is. Buffers are the model's own.

    Args:
        model: The model, private or not.
        optimizer: Its optimizer: each of its steps that changes parameters is one iterate.
        kind: "exponential" (weights decay with the steps that have passed) or "tail" (the mean of all steps from
            `start` on).
        decay: Of "exponential", in [0, 1); the first steps count more, as for a shorter training:
            min(decay, (1 + t) / (10 + t)).
        start: Number of the step that "tail" begins with.

    Attributes:
        steps: Iterates that were averaged.

    Raises:
        InvalidOptionError: If an option is out of range.

    Cost:
        A copy of the parameters, and one pass over them in each step.

    Example:
        >>> averaged = ghostclip.mechanisms.AveragedWeights(model, optimizer, decay=0.99)
        >>> loss = model(torch.randn(4, 4)).sum()  # train as before, then
        >>> with averaged.applied():
        ...     score = model(torch.randn(4, 4))  # evaluate, or save
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, kind: str = "exponential", decay: float = 0.999, start: int = 0
    ) -> None:
        self._exponential = choice(kind, "kind", ("exponential", "tail")) == "exponential"
        if not 0 <= decay < 1:
            raise InvalidOptionError(f"decay={decay!r}: must be in [0, 1).")
        self._parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._decay, self._start = decay, start
        self._averages = [p.detach().clone() for p in self._parameters]
        self._seen = self.steps = 0
        self._handle = optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are for the next iterate; the optimizer's steps call it."""
        self._seen += 1
        if self._seen <= self._start:
            return
        self.steps += 1
        weight = 1 / self.steps
        if self._exponential:
            weight = max(1 - self._decay, 1 - (1 + self.steps) / (10 + self.steps))
        move_all_(self._averages, self._parameters, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages, and give it its own parameters back at the end.

        Yields:
            Nothing.
        """
        originals = [p.detach().clone() for p in self._parameters]
        try:
            self._copy(self._averages)
            yield
        finally:
            self._copy(originals)

    @torch.no_grad()
    def _copy(self, values: list[torch.Tensor]) -> None:
        if self.steps:
            copy_all_(self._parameters, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their numbers of steps, for a checkpoint; as private as the parameters."""
        return {"seen": self._seen, "steps": self.steps, "averages": list(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same parameters."""
        averages = state["averages"]
        if [one.shape for one in averages] != [one.shape for one in self._averages]:
            raise ResumeError("averages: saved of other parameters. Resume with the model of before.")
        self._seen, self.steps = int(state["seen"]), int(state["steps"])
        for average, saved in zip(self._averages, averages, strict=True):
            average.copy_(saved)

    def detach(self) -> None:
        """Take no note of further steps."""
        self._handle.remove()


Filter = tuple[Section, ...]

_WORST: Final = 1e6
_ROUNDED: Final = 1 + 1e-9
"""Rounding of a few million sums in float64, and more."""
_FEW: Final = {"inverse": 2048, "banded": 2048, "buffered": 16384}
"""Steps that coefficients are chosen for at most: beyond, the best hardly move."""
_COLUMNS, _TRIED = 2048, 24
"""Columns that an error with learning rates is summed over, equally many apart, and as it is tried."""


class Workload(NamedTuple):
    """What an optimizer makes of gradients.

    Attributes:
        momentum: β in [0, 1): steps are along v_t = β·v_{t-1} + (1 - β)·g_t.
        learning_rates: Of each step; None for 1 in all.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def over(self, steps: int) -> Workload:
        """Return it with as many learning rates, of steps equally far apart."""
        if self.learning_rates is None or len(self.learning_rates) == steps:
            return self
        place_T = np.linspace(0, len(self.learning_rates) - 1, steps)
        rates_T = np.interp(place_T, np.arange(len(self.learning_rates)), self.learning_rates)
        return self._replace(learning_rates=tuple(rates_T.tolist()))


PREFIX_SUMS: Final = Workload()


def of_inverse(coefficients: Sequence[float]) -> Filter:
    """Return C⁻¹ with these coefficients."""
    return ((tuple(coefficients), (1.0,)),)


def inverse_of(matrix: Filter) -> Filter:
    """Return the inverse of a matrix."""
    return tuple((below, above) for above, below in matrix)


def buffered(poles: Sequence[float], zeros: Sequence[float]) -> Filter:
    """Return C⁻¹ of a BLT: Π_i (1 - λ_i·x) / (1 - μ_i·x), with the poles λ and zeros μ of C."""
    return tuple(((1.0, -pole), (1.0, -zero)) for pole, zero in zip(poles, zeros, strict=True))


def powers(exponent: float, count: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^exponent: of prefix sums' matrix with the exponent -1.

    With -½ they are those of its square root, with ½ of the inverse of that.
    """
    coefficients = [1.0]
    for power in range(1, count):
        coefficients.append(coefficients[-1] * (power - 1 - exponent) / power)
    return tuple(coefficients)


def series(matrix: Filter, steps: int) -> Array:
    """Return the first coefficients of a Toeplitz matrix, shape [T]."""
    from scipy.signal import lfilter

    found_T = np.zeros(steps)
    found_T[0] = 1.0
    for above, below in matrix:
        found_T = lfilter(above, below, found_T)
    return np.asarray(found_T, dtype=np.float64)


@lru_cache(maxsize=256)
def sensitivity(matrix: Filter, steps: int, *, separation: int) -> float:
    """Return s ≥ 1, rounded upwards: the most that one record moves Cx by, if every b-th step may be its own.

    Columns i, i + b, … of C, each with a vector of norm at most 1 of its own, move Cx by at most the norm of the sum of
    their absolute values, and no i has a larger one than 0: its rows are those of any other, and more.

    Reference:
        Kalinin and Lampert (2024), Theorem 2.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total_T = np.abs(series(inverse_of(matrix), steps))
        for begin in range(separation, steps, separation):
            # Each block is added to what the block before it has become.
            block = total_T[begin : begin + separation]
            block += total_T[begin - separation : begin - separation + block.size]
        squared = float(total_T @ total_T)
    if not math.isfinite(squared):
        raise InvalidOptionError(
            f"coefficients={matrix!r}: the inverse of this matrix grows without bound; use coefficients whose sum is "
            "at least 0, as 1, -0.5."
        )
    return math.sqrt(squared) * _ROUNDED


def error(matrix: Filter, steps: int, workload: Workload = PREFIX_SUMS, *, columns: int = _COLUMNS) -> float:
    """Return ‖A·C⁻¹‖_F / √T: the root mean square of the noise in the parameters over T steps, for s = σ = 1."""
    # `columns` of A·C⁻¹, equally far apart, are looked at where there are learning rates.
    # Each gradient is averaged by momentum (1 - β in the numerator), then weighted and summed.
    averaged = ((1.0 - workload.momentum,), (1.0, -workload.momentum))
    seen_T = series((*matrix, averaged), steps)
    rates = workload.over(steps).learning_rates
    if rates is None:
        return math.sqrt(float(np.cumsum(np.cumsum(seen_T) ** 2).mean()))
    rates_T, spacing = np.asarray(rates), -(-steps // columns)
    looked_at = range(spacing // 2, steps, spacing)
    column_sums = (np.cumsum(rates_T[j:] * seen_T[: steps - j]) for j in looked_at)
    return math.sqrt(sum(float(one_T @ one_T) for one_T in column_sums) / len(looked_at))


@lru_cache(maxsize=32)
def optimal(family: str, size: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS) -> Filter:
    """Return C⁻¹ with the least error times sensitivity of a family, found numerically.

    Families are "inverse" (C⁻¹ has p bands), "banded" (C has), and "buffered" (BLT with d buffers).

    Reference:
        Choquette-Choo et al. (2023); Kalinin et al. (2025); McMahan et al. (2024), which chooses poles and zeros.
    """
    from scipy.optimize import minimize

    few = min(steps, max(4 * size, _FEW[family]))
    capped = min(separation, few)
    seen = workload.over(few)
    make, start = _FAMILIES[family](size, capped)
    starts = [np.array(start)]
    if family != "buffered" and size > 3:
        half = optimal(family, size // 2, steps, separation, workload)
        starts.append(np.array([*max(half[0], key=len)[1:], *[0.0] * (size - size // 2)]))

    def loss(values: Array) -> float:
        matrix = make(values.tolist())
        with np.errstate(all="ignore"):
            try:
                value = math.log(error(matrix, few, seen, columns=_TRIED) * sensitivity(matrix, few, separation=capped))
            except (InvalidOptionError, OverflowError, ValueError):
                return _WORST
        return min(value, _WORST)

    candidates = [one for first in starts for one in (first, minimize(loss, first, method="L-BFGS-B").x)]
    return make(min(candidates, key=loss).tolist())


Made = tuple[Callable[[list[float]], Filter], list[float]]


def _inverses(size: int, separation: int) -> Made:
    del separation
    return lambda rest: of_inverse((1.0, *rest)), list(powers(0.5, size)[1:])


def _bandeds(size: int, separation: int) -> Made:
    del separation
    return lambda rest: inverse_of(of_inverse((1.0, *rest))), list(powers(-0.5, size)[1:])


def _buffereds(size: int, separation: int) -> Made:
    """Poles and zeros of C take turns in (0, 1), a pole the nearest to 1: all of its coefficients are positive."""

    def make(logs: list[float]) -> Filter:
        # Their logarithms are sums of positive numbers.
        roots = np.exp(-np.cumsum(np.exp(np.clip(logs, -40.0, 5.0)))).tolist()
        return buffered(roots[::2], roots[1::2])

    # From 5/b to 1 away from 1, equally far apart by their logarithm.
    distances = -np.log1p(-np.geomspace(min(0.3, 5 / separation), 0.8, 2 * size))
    return make, np.log(np.diff(distances, prepend=0.0)).tolist()


_FAMILIES: Final = {"inverse": _inverses, "banded": _bandeds, "buffered": _buffereds}


class Mechanism(Protocol):
    """What one training releases; `PrivacyEngine` asks nothing else of it."""

    @property
    def theorem(self) -> str:
        """What proves its cost, as one clause."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return how batches are drawn.

        Args:
            num_samples: N.
            batch_size: Records of a batch, on average.

        Returns:
            The scheme, with the event that its steps or rounds are.
        """

    def correlation(self, scheme: SamplingScheme) -> Correlation | None:
        """Return how steps' noise is correlated.

        Args:
            scheme: What `scheme` returned.

        Returns:
            The correlation; None for independent noise, as by default.
        """
        del scheme
        return None

    def periods(self, scheme: SamplingScheme, first: int, count: int) -> list[float]:
        """Return what rounds or epochs that follow each other cost, beside what the event says.

        Args:
            scheme: What `scheme` returned.
            first: Number of the first of them.
            count: How many.

        Returns:
            Factors on σ, one for each; by default ones: an event costs what it says.
        """
        del scheme, first
        return [1.0] * count

    def for_epochs(self, epochs: int) -> Any:
        """Return the mechanism of a training of so many epochs.

        Args:
            epochs: Passes over the data.

        Returns:
            Itself, where it is the same for any length, as by default.
        """
        del epochs
        return self

    def error(self, scheme: SamplingScheme, steps: int, workload: Workload) -> float:
        """Return the root of the mean square of the noise in the parameters, for σ = C = 1; see `plan_privacy`.

        Args:
            scheme: What `scheme` returned.
            steps: T.
            workload: What the optimizer makes of gradients.

        Returns:
            It, in units of the clipping norm; by default that of independent noise.
        """
        del scheme
        return error(of_inverse((1.0,)), steps, workload)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(Mechanism):
    """DP-SGD as `make_private` does it by default: each record joins each batch independently, noise is independent.

    Attributes:
        max_batch_size: Largest batch: of a larger sample a random subset is kept, which is accounted for; None for no
            limit.

    Example:
        >>> ghostclip.mechanisms.PoissonSampling().theorem
        'privacy loss distribution of the Poisson-subsampled Gaussian mechanism (Zhu, Dong, Wang 2022)'
    """

    max_batch_size: int | None = None

    theorem = "privacy loss distribution of the Poisson-subsampled Gaussian mechanism (Zhu, Dong, Wang 2022)"
    """What proves its cost."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return Poisson sampling with q = batch_size / N."""
        return Poisson(num_samples=num_samples, sample_rate=batch_size / num_samples, truncation=self.max_batch_size)


@dataclass(frozen=True, kw_only=True)
class BallsInBins(Mechanism):
    """Each record is in exactly one batch of every epoch, drawn uniformly and anew for each epoch; independent noise.

    In T = k·t steps every record takes part exactly k times, which costs less noise than Poisson sampling of the same
    size for the same ε, up to a few percent; no record is missed by chance.

    Attributes:
        uniform: Draw the k steps of a record from all T uniformly, not one in each epoch. What is proved of its cost is
            the same; it is charged for all `epochs` when the first of them begins.
        epochs: k, of "uniform" only; `make_private_with_epsilon` takes its own.

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private_with_epsilon(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     mechanism=ghostclip.mechanisms.BallsInBins(),
        ...     target_epsilon=3.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
        ... )
        >>> print(f"σ = {optimizer.noise_multiplier:.2f}")
        σ = 0.90
    """

    uniform: bool = False
    epochs: int | None = None

    theorem = "privacy loss distribution of random allocation (Feldman and Shenfeld 2025)"
    """What proves its cost."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return random allocation to round(N / batch_size) steps an epoch."""
        if self.uniform and self.epochs is None:
            raise InvalidOptionError("mechanism BallsInBins(uniform=True, epochs=None): steps of how many? Give it.")
        steps = steps_per_epoch(batch_size / num_samples)
        rounds = positive_int(self.epochs, "epochs") if self.uniform else 1
        return RandomAllocation(num_samples=num_samples, epoch_steps=steps, rounds=rounds)

    def for_epochs(self, epochs: int) -> BallsInBins:
        """Return the mechanism for a number of epochs, unless it is for one already."""
        return self if self.epochs is not None or not self.uniform else replace(self, epochs=epochs)


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(Mechanism):
    """Records are dealt out to groups once, and each step draws a Poisson sample from the next group.

    Attributes:
        groups: b, at least 1: a record is in at most one of b steps that follow each other.

    Example:
        >>> scheme = ghostclip.mechanisms.CyclicPoissonSampling(groups=4).scheme(num_samples=1000, batch_size=50)
        >>> scheme.sample_rate, scheme.steps
        (0.2, 20)
    """

    groups: int

    theorem = "b steps are one Poisson event of b times the rate (Choquette-Choo et al. 2023)"
    """What proves its cost."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return Poisson samples of the groups, of rate b·batch_size / N."""
        return _cyclic_poisson(positive_int(self.groups, "groups"), num_samples, batch_size)


def _cyclic_poisson(groups: int, num_samples: int, batch_size: int) -> CyclicPoisson:
    most = steps_per_epoch(batch_size / num_samples)
    if groups > most:
        raise InvalidOptionError(
            f"groups={groups}: {num_samples} records in batches of {batch_size} are {most} groups at most."
        )
    rate = 1.0 if groups == most else fraction(groups * batch_size / num_samples, "groups * batch_size / num_samples")
    return CyclicPoisson(
        num_samples=num_samples, groups=groups, sample_rate=rate, epoch_steps=groups * steps_per_epoch(rate)
    )


@dataclass(frozen=True, kw_only=True)
class UnamplifiedSampling(Mechanism):
    """DP-SGD without amplification by sampling: the same batches in the same order in every epoch, independent noise.

    Each epoch costs one Gaussian mechanism, whatever the size of batches. It is what correlated noise is compared with
    where records cannot be sampled at random.

    Example:
        >>> scheme = ghostclip.mechanisms.UnamplifiedSampling().scheme(num_samples=1000, batch_size=50)
        >>> scheme.event.kind, scheme.steps
        ('cyclic', 20)
    """

    theorem = "each epoch is one Gaussian mechanism (Balle and Wang 2018)"
    """What proves its cost."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return the same round(N / batch_size) batches in every epoch."""
        return _cyclic(num_samples, batch_size)


def _cyclic(num_samples: int, batch_size: int) -> Cyclic:
    return Cyclic(num_samples=num_samples, epoch_steps=steps_per_epoch(batch_size / num_samples))


@dataclass(frozen=True, kw_only=True)
class Correlated(Mechanism):
    """What mechanisms with correlated noise have in common: noise that is chosen for a length and an optimizer.

    Attributes:
        epochs: Passes that the noise is for. More are possible: each costs what it adds. `make_private_with_epsilon`
            takes its own `epochs` where this is None.
        momentum: Of the optimizer, for "optimal" coefficients; 0 for plain steps.
        learning_rates: Of every step, for "optimal" coefficients, up to a factor; None for equal ones. As many as there
            are steps, or any number of them equally far apart.
    """

    epochs: int | None = None
    momentum: float = 0.0
    learning_rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            positive_int(self.epochs, "epochs")
        if self.learning_rates is not None:
            object.__setattr__(self, "learning_rates", tuple(map(float, self.learning_rates)))
        workload_of(self.momentum, self.learning_rates)

    def for_epochs(self, epochs: int) -> Any:
        """Return the mechanism for a number of epochs, unless it is for one already."""
        return self if self.epochs is not None else replace(self, epochs=positive_int(epochs, "epochs"))

    def error(self, scheme: SamplingScheme, steps: int, workload: Workload) -> float:
        """Return the error of its noise."""
        correlation = self.correlation(scheme)
        assert correlation is not None, "noise is correlated"
        return error(correlation.sections, steps, workload) * correlation.scale

    def _length(self) -> int:
        if self.epochs is None:
            raise InvalidOptionError(
                f"mechanism {type(self).__name__}(epochs=None): its noise depends on how often a record takes part; "
                "give it."
            )
        return self.epochs

    def _optimal(self, family: str, size: int, scheme: SamplingScheme, separation: int) -> Filter:
        workload = workload_of(self.momentum, self.learning_rates)
        return optimal(family, size, self._length() * scheme.steps, separation, workload)


def workload_of(momentum: float, learning_rates: Sequence[float] | None) -> Workload:
    """Return what an optimizer makes of gradients, checked."""
    if not 0 <= momentum < 1:
        raise InvalidOptionError(f"momentum={momentum!r}: must be in [0, 1).")
    if learning_rates is not None and not (
        learning_rates and any(learning_rates) and all(0 <= rate < math.inf for rate in learning_rates)
    ):
        raise InvalidOptionError("learning_rates: finite numbers of at least 0 are needed, some of them above.")
    return Workload(momentum, None if learning_rates is None else tuple(learning_rates))


def _checked(coefficients: str | Sequence[float], bands: int) -> str | tuple[float, ...]:
    """Return the coefficients of a matrix with bands: a name, or all but the first one."""
    if positive_int(bands, "bands") < 2:
        raise InvalidOptionError("bands=1: that is independent noise. Use at least 2, or another mechanism.")
    if isinstance(coefficients, str):
        return choice(coefficients, "coefficients", ("optimal", "square_root"))
    if len(coefficients) != bands - 1:
        raise InvalidOptionError(
            f"coefficients={coefficients!r}: {bands - 1} are needed for bands={bands}, all but the first one, which "
            "is 1."
        )
    return tuple(map(float, coefficients))


class _OneStream(Correlated):
    """What mechanisms have in common whose records take part once an epoch, in the same step of each.

    Privacy:
        The whole stream of releases is one Gaussian mechanism with noise multiplier σ: s bounds what a record moves
        Cx by in the steps that it takes part in, exactly one in each epoch, `separation` apart. An epoch is charged
        when it begins, with the part of s² that it adds, so that ε of a training that ends early is less. Each step's
        noise belongs to one draw of the loader; a step that draws otherwise is refused before anything is released.
    """

    theorem = "one Gaussian mechanism on the stream (Denisov et al. 2022; sensitivity: Kalinin and Lampert 2024)"
    """What proves its cost."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return the same round(N / batch_size) batches in every epoch."""
        return _cyclic(num_samples, batch_size)

    def correlation(self, scheme: SamplingScheme) -> Correlation | None:
        """Return C⁻¹, and s."""
        return Correlation(self._matrix(scheme), self._sensitivity(scheme, self._length()))

    def periods(self, scheme: SamplingScheme, first: int, count: int) -> list[float]:
        """Return s / √(s_e² - s_{e-1}²) of each epoch e."""
        squares = [self._sensitivity(scheme, epoch) ** 2 if epoch else 0.0 for epoch in range(first, first + count + 1)]
        whole = self._sensitivity(scheme, self._length())
        return [whole / math.sqrt(more - less) for less, more in pairwise(squares)]

    def _sensitivity(self, scheme: SamplingScheme, epochs: int) -> float:
        return sensitivity(self._matrix(scheme), epochs * scheme.steps, separation=scheme.steps)

    def _matrix(self, scheme: SamplingScheme) -> Filter:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BandedInverse(_OneStream):
    """Correlated noise without a byte of memory: a step takes back a part of the noise of the p - 1 steps before.

    Batches have one size and come in the same order in every epoch; step t adds σ·s·Σ_j c_j·z_{t-j} in units of the
    clipping norm, and earlier z are drawn again from the key instead of being stored. What parameters see are sums of
    steps, in which most of the noise cancels: at equal (ε, δ) much less is left than of independent noise without
    amplification, and less than with Poisson sampling where ε is not small, or records are seen once or twice.
    `ghostclip.mechanisms.plan_privacy` compares.

    Privacy:
        One Gaussian mechanism on the whole stream, charged by epochs; see `Correlated` for what all have in common.

    Attributes:
        bands: p, at least 2.
        coefficients: "optimal" (least error in `epochs`, found numerically), "square_root" (the banded inverse square
            root), or c_1, …, c_{p-1} themselves, as (-0.9,) of DP-λCGD.

    Reference:
        Kalinin et al. (2025), arXiv:2505.12128 (banded inverse square root); arXiv:2605.18379 (one coefficient λ).

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private_with_epsilon(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     mechanism=ghostclip.mechanisms.BandedInverse(bands=4),
        ...     target_epsilon=3.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
        ... )
        >>> print(f"σ = {optimizer.noise_multiplier:.2f}")
        σ = 1.04
    """

    bands: int
    coefficients: str | Sequence[float] = "optimal"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coefficients", _checked(self.coefficients, self.bands))

    def _matrix(self, scheme: SamplingScheme) -> Filter:
        if self.coefficients == "square_root":
            return of_inverse(powers(0.5, self.bands))
        if self.coefficients == "optimal":
            return self._optimal("inverse", self.bands, scheme, scheme.steps)
        return of_inverse((1.0, *map(float, self.coefficients)))


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitz(_OneStream):
    """Buffered linear Toeplitz noise (BLT): d buffers take back noise of all steps before, however long the training.

    Sampling and cost are those of `BandedInverse`. C⁻¹ is the product of d factors (1 - λx) / (1 - μx), each of which
    holds one buffer of the parameters' size, on the rank that draws that part of the noise. In long trainings three of
    them leave less noise than eight bands.

    Privacy:
        One Gaussian mechanism on the whole stream, charged by epochs; see `Correlated` for what all have in common.

    Attributes:
        buffers: d, at least 1.

    Cost:
        d buffers in float32, and one draw in a step. Checkpoints hold none of them: resuming draws the noise of all
        steps before once more.

    Reference:
        Dvijotham et al. (2024), arXiv:2404.16706; McMahan et al. (2024), arXiv:2408.08868.

    Example:
        >>> mechanism = ghostclip.mechanisms.BufferedToeplitz(buffers=3, epochs=2)
        >>> mechanism.correlation(mechanism.scheme(num_samples=1000, batch_size=50)).buffers
        3
    """

    buffers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int(self.buffers, "buffers")

    def _matrix(self, scheme: SamplingScheme) -> Filter:
        return self._optimal("buffered", self.buffers, scheme, scheme.steps)


@dataclass(frozen=True, kw_only=True)
class BandedMatrixFactorization(Correlated):
    """Correlated noise with amplification by sampling (BandMF): C has b bands, batches are drawn from groups in turn.

    Records are dealt out to g ≥ b groups once, and each step draws a Poisson sample from the next one. Two batches of a
    record lie at least b steps apart, so that they share no row of C: a round of g steps costs what one step of DP-SGD
    does that samples with g times the rate. Few bands have more amplification, many cancel more noise.

    Privacy:
        A round is a Poisson-subsampled Gaussian mechanism of rate g·B/N and noise multiplier σ, where steps add
        σ·‖c‖·C⁻¹z with ‖c‖ the norm of a column of C; rounds compose as steps of DP-SGD do. Rounds are charged when
        they begin. Who is in which group is public, and does not depend on the records.

    Attributes:
        bands: b, at least 2.
        groups: g, at least b; by default the fewest with which an epoch has about N / batch_size steps. With as many as
            an epoch has batches nothing is amplified.
        coefficients: "optimal" (least error in `epochs`, found numerically), "square_root" (the first ones of the
            square root), or c_1, …, c_{b-1} of C themselves.

    Cost:
        b - 1 buffers of the parameters' size in float32, on the rank that draws that part of the noise, and one draw in
        a step. Checkpoints hold none of them: resuming draws the noise of all steps before once more.

    Reference:
        Choquette-Choo et al. (2023), (Amplified) banded matrix factorization, arXiv:2306.08153.

    Example:
        >>> mechanism = ghostclip.mechanisms.BandedMatrixFactorization(bands=4, epochs=2)
        >>> scheme = mechanism.scheme(num_samples=1000, batch_size=50)
        >>> scheme.sample_rate, mechanism.correlation(scheme).buffers
        (0.2, 3)
    """

    bands: int
    groups: int | None = None
    coefficients: str | Sequence[float] = "optimal"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coefficients", _checked(self.coefficients, self.bands))
        if self.groups is not None and positive_int(self.groups, "groups") < self.bands:
            raise InvalidOptionError(
                f"groups={self.groups} with bands={self.bands}: a record's batches would share rows of C, which no "
                "account is known of. Use at least as many groups as bands."
            )

    theorem = "b steps are one Poisson-subsampled Gaussian mechanism of b times the rate (Choquette-Choo et al. 2023)"
    """What proves its cost."""

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return Poisson samples of the groups."""
        steps = steps_per_epoch(batch_size / num_samples)
        fewest = -(-steps // max(1, steps // self.bands))
        return _cyclic_poisson(self.groups or max(self.bands, fewest), num_samples, batch_size)

    def correlation(self, scheme: SamplingScheme) -> Correlation | None:
        """Return C⁻¹, and the norm of a column of C."""
        matrix = self._matrix(scheme)
        return Correlation(matrix, sensitivity(matrix, self.bands, separation=self.bands))

    def _matrix(self, scheme: SamplingScheme) -> Filter:
        if self.coefficients == "optimal":
            # Columns that share no row move Cx by the norm of one, as often as they are there.
            return self._optimal("banded", self.bands, scheme, self._length() * scheme.steps)
        column = powers(-0.5, self.bands) if self.coefficients == "square_root" else (1.0, *self.coefficients)
        return inverse_of(of_inverse(tuple(map(float, column))))


BANDS = (2, 4, 8)
"""Bands of correlated noise that are compared: each is one more pass of drawing noise, or one more buffer."""
BUFFERS = 3
"""Buffers of a BLT that is compared; more leave little less."""

_LONG = 10_000
"""Steps after which noise is about as large as it becomes."""
_WORTH_SAMPLING, _WORTH_CORRELATION, _WORTH_BUFFERS = 1.01, 1.25, 1.1
"""How much more noise a simpler mechanism may leave: what less was worth in trainings (paper_repro, table F)."""


@dataclass(frozen=True, kw_only=True)
class CalibratedMechanism:
    """A mechanism, calibrated for a budget.

    Attributes:
        mechanism: Give it to `make_private_with_epsilon`.
        noise_multiplier: σ.
        epsilon: ε of the whole training, at most the target.
        noise: Root of the mean square, over all steps, of the noise in one parameter of SGD with the learning rates
            given (1 by default), in units of the clipping norm: σ·‖A·C⁻¹‖_F·s / (√T·B).
        draws: Gaussian numbers that are drawn for each parameter in a step.
        buffers: Tensors of the parameters' size that noise takes from step to step.
    """

    mechanism: Mechanism
    noise_multiplier: float
    epsilon: float
    noise: float
    draws: int
    buffers: int = 0


@suggests_options
def plan_privacy(  # noqa: PLR0913 - what a training is planned by
    *,
    num_samples: int,
    batch_size: int,
    epochs: int,
    target_epsilon: float,
    target_delta: float,
    momentum: float = 0.0,
    learning_rates: Sequence[float] | None = None,
    mechanisms: Sequence[Mechanism] | None = None,
) -> list[CalibratedMechanism]:
    """Return what mechanisms leave of noise in the parameters at one budget, the least first.

    What a training sees of the noise is its sum over the steps so far; that is what is compared. It says nothing of
    clipping, nor of how far from its optimum a training ends: of two mechanisms the one with the smaller number has the
    better accuracy where noise is what limits it.

    Args:
        num_samples: N, records of the data set.
        batch_size: Records of a batch, on average.
        epochs: Passes over the data.
        target_epsilon: ε not to be exceeded.
        target_delta: δ.
        momentum: Of the optimizer, in [0, 1).
        learning_rates: Of its steps, or of any number of steps equally far apart; None for 1 in all.
        mechanisms: What to compare; by default Poisson sampling, balls in bins, and correlated noise of 2, 4 and 8
            bands, of its inverse and with sampling, and with 3 buffers.

    Returns:
        Plans, the one with the least noise first.

    Raises:
        InvalidOptionError: If an option is out of range.
        BudgetError: If no noise keeps the budget.

    Cost:
        Some seconds for balls in bins, whose cost has no formula, and for coefficients.

    Example:
        >>> plans = ghostclip.mechanisms.plan_privacy(
        ...     num_samples=10_000, batch_size=500, epochs=5, target_epsilon=8.0, target_delta=1e-5
        ... )
        >>> type(plans[0].mechanism).__name__
        'BandedInverse'
    """
    samples, size = positive_int(num_samples, "num_samples"), positive_int(batch_size, "batch_size")
    if size > samples:
        raise InvalidOptionError(f"batch_size={size}: there are only {samples} samples.")
    target, delta = positive(target_epsilon, "target_epsilon"), probability(target_delta, "target_delta")
    length = positive_int(epochs, "epochs")
    workload = workload_of(momentum, learning_rates)
    seen: dict[str, Any] = {"momentum": momentum, "learning_rates": learning_rates}
    usual: tuple[Mechanism, ...] = (
        PoissonSampling(),
        BallsInBins(),
        *(BandedInverse(bands=bands, **seen) for bands in BANDS),
        *(BandedMatrixFactorization(bands=bands, **seen) for bands in BANDS if bands <= samples // size),
        BufferedToeplitz(buffers=BUFFERS, **seen),
    )
    plans = []
    for mechanism in (one.for_epochs(length) for one in (usual if mechanisms is None else mechanisms)):
        scheme = mechanism.scheme(samples, size)
        sigma, epsilon = calibrated(mechanism, scheme, length, (target, delta))
        correlation = mechanism.correlation(scheme)
        plan = CalibratedMechanism(
            mechanism=mechanism,
            noise_multiplier=sigma,
            epsilon=epsilon,
            noise=sigma * mechanism.error(scheme, length * scheme.steps, workload) / scheme.expected_batch_size,
            draws=1 if correlation is None or correlation.lags is None else len(correlation.lags),
            buffers=0 if correlation is None else correlation.buffers,
        )
        plans.append(plan)
    return sorted(plans, key=lambda plan: plan.noise)


def calibrated(
    mechanism: Mechanism, scheme: SamplingScheme, epochs: int, budget: tuple[float, float]
) -> tuple[float, float]:
    """Return the least σ found that keeps (ε, δ) for a number of epochs, and the ε of it."""
    event, steps, (target, delta) = scheme.event, epochs * scheme.steps, budget
    factors = mechanism.periods(scheme, 0, steps // event.steps_per_event)

    def epsilon_of(sigma: float) -> float:
        accountant = bounding_accountant(relation=event.relation)
        for factor in sorted(set(factors)):
            accountant.record(event, noise_multiplier=sigma * factor, count=factors.count(factor))
        with warnings.catch_warnings():
            # The search tries σ that nobody would use, where numbers overflow on the way to inf.
            warnings.simplefilter("ignore", RuntimeWarning)
            return accountant.get_epsilon(delta)

    sigma = smallest_noise_multiplier(epsilon_of, target=target, tolerance=1e-3 * target)
    return sigma, epsilon_of(sigma)


def recommended(plans: Sequence[CalibratedMechanism]) -> CalibratedMechanism:
    """Return the simplest mechanism that leaves about as little as the best: a larger gain must pay for more rules."""
    least = plans[0].noise
    for kind, room in (
        (PoissonSampling, _WORTH_SAMPLING),
        (BallsInBins, _WORTH_CORRELATION),
        (BandedInverse, _WORTH_BUFFERS),
    ):
        simple = [plan for plan in plans if isinstance(plan.mechanism, kind) and plan.noise <= room * least]
        if simple:
            return simple[0]
    return plans[0]


def recommendation(plans: Sequence[CalibratedMechanism]) -> str:
    """Return in one sentence what to take, what it gains over Poisson sampling, and what it asks for."""
    best = recommended(plans)
    usual = next((plan for plan in plans if isinstance(plan.mechanism, PoissonSampling)), best)
    if best is usual:
        return "Poisson sampling: nothing else leaves 1 % less noise in the parameters."
    asks = "each record is in exactly one batch of an epoch"
    if isinstance(best.mechanism, Correlated):
        drawn = "batches come from groups of records in turn"
        if not isinstance(best.mechanism, BandedMatrixFactorization):
            drawn = "batches come in the same order in every epoch"
        memory = f"holds {best.buffers} buffers of the parameters' size"
        if not best.buffers:
            memory = f"draws noise {best.draws} times, without memory"
        asks = f"{drawn}, σ stays what it is, and each step {memory}"
    gain = 100 * (1 - best.noise / usual.noise)
    return f"{described(best.mechanism)}: {gain:.0f} % less noise in parameters than Poisson sampling; {asks}."


def described(mechanism: Mechanism) -> str:
    """Return a mechanism as a line of Python, as ``BandedInverse(bands=4)``."""
    told = {
        name: value
        for name, value in vars(mechanism).items()
        if name in ("bands", "buffers", "groups", "max_batch_size") and value is not None
    }
    return f"{type(mechanism).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"


def noise_to_batch(plan: CalibratedMechanism, *, num_samples: int, batch_size: int) -> float:
    """Return σ·s/B: the standard deviation of a step's noise in a mean gradient, in units of the clipping norm."""
    # Of a plan that is calibrated for this batch size. At another one the same number is the same noise in each step;
    # of correlated noise in steps that have all of what they take back.
    scheme = plan.mechanism.scheme(num_samples, batch_size)
    correlation = plan.mechanism.correlation(scheme)
    norm = 1.0
    if correlation is not None:
        norm = correlation.scale * math.hypot(*series(correlation.sections, _LONG))
    return plan.noise_multiplier * norm / scheme.expected_batch_size
