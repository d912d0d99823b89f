"""Mechanisms: how records are drawn, what noise a step adds, and what both cost together, in one frozen object.

`PrivacyEngine.make_private(mechanism=...)` takes its loader, its noise and its charges from here, so that they cannot
disagree; what nobody can account for cannot be built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from ghostclip._validate import choice, fraction, positive_int
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.data.schemes import Cyclic, CyclicPoisson, Poisson, RandomAllocation, SamplingScheme
from ghostclip.errors import InvalidOptionError
from ghostclip.mechanisms import toeplitz
from ghostclip.mechanisms.toeplitz import Filter, Workload
from ghostclip.noise.correlated import Correlation


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
        return toeplitz.error(toeplitz.of_inverse((1.0,)), steps, workload)


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
        return toeplitz.error(correlation.sections, steps, workload) * correlation.scale

    def _length(self) -> int:
        if self.epochs is None:
            raise InvalidOptionError(
                f"mechanism {type(self).__name__}(epochs=None): its noise depends on how often a record takes part; "
                "give it."
            )
        return self.epochs

    def _optimal(self, family: str, size: int, scheme: SamplingScheme, separation: int) -> Filter:
        workload = workload_of(self.momentum, self.learning_rates)
        return toeplitz.optimal(family, size, self._length() * scheme.steps, separation, workload)


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
        return toeplitz.sensitivity(self._matrix(scheme), epochs * scheme.steps, separation=scheme.steps)

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
            return toeplitz.of_inverse(toeplitz.square_root_of_inverse(self.bands))
        if self.coefficients == "optimal":
            return self._optimal("inverse", self.bands, scheme, scheme.steps)
        return toeplitz.of_inverse((1.0, *map(float, self.coefficients)))


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
        return Correlation(matrix, toeplitz.sensitivity(matrix, self.bands, separation=self.bands))

    def _matrix(self, scheme: SamplingScheme) -> Filter:
        if self.coefficients == "optimal":
            # Columns that share no row move Cx by the norm of one, as often as they are there.
            return self._optimal("banded", self.bands, scheme, self._length() * scheme.steps)
        column = toeplitz.square_root(self.bands) if self.coefficients == "square_root" else (1.0, *self.coefficients)
        return toeplitz.inverse_of(toeplitz.of_inverse(tuple(map(float, column))))
