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
from ghostclip.mechanisms.toeplitz import error, optimal_inverse, sensitivity, square_root_of_inverse
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
            The correlation; None for independent noise.
        """

    def periods(self, scheme: SamplingScheme, first: int, count: int) -> list[float]:
        """Return what rounds or epochs that follow each other cost, beside what the event says.

        Args:
            scheme: What `scheme` returned.
            first: Number of the first of them.
            count: How many.

        Returns:
            Factors on σ, one for each.
        """

    def for_epochs(self, epochs: int) -> Mechanism:
        """Return the mechanism of a training of so many epochs.

        Args:
            epochs: Passes over the data.

        Returns:
            Itself, where it is the same for any length.
        """

    def error(self, scheme: SamplingScheme, steps: int, *, momentum: float) -> float:
        """Return the root of the mean square of the noise in the parameters, for σ = C = 1; see `plan_privacy`.

        Args:
            scheme: What `scheme` returned.
            steps: T.
            momentum: Of the optimizer.

        Returns:
            It, in units of the clipping norm.
        """


class _Independent(Mechanism):
    """What mechanisms with independent noise have in common."""

    def correlation(self, scheme: SamplingScheme) -> Correlation | None:
        """Return None."""
        del scheme
        return None

    def periods(self, scheme: SamplingScheme, first: int, count: int) -> list[float]:
        """Return ones: an event costs what it says."""
        del scheme, first
        return [1.0] * count

    def for_epochs(self, epochs: int) -> Any:
        """Return the mechanism itself."""
        del epochs
        return self

    def error(self, scheme: SamplingScheme, steps: int, *, momentum: float) -> float:
        """Return the error of independent noise."""
        del scheme
        return error((1.0,), steps, momentum=momentum)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(_Independent):
    """DP-SGD as `make_private` does it by default: each record joins each batch independently, noise is independent.

    Attributes:
        max_batch_size: Largest batch: of a larger sample a random subset is kept, which is accounted for; None for no
            limit.

    Example:
        >>> ghostclip.mechanisms.PoissonSampling().theorem
        'privacy loss distribution of the Poisson-subsampled Gaussian mechanism (Zhu, Dong, Wang 2022)'
    """

    max_batch_size: int | None = None

    @property
    def theorem(self) -> str:
        """What proves its cost."""
        return "privacy loss distribution of the Poisson-subsampled Gaussian mechanism (Zhu, Dong, Wang 2022)"

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return Poisson sampling with q = batch_size / N."""
        return Poisson(num_samples=num_samples, sample_rate=batch_size / num_samples, truncation=self.max_batch_size)


@dataclass(frozen=True, kw_only=True)
class BallsInBins(_Independent):
    """Each record is in exactly one batch of every epoch, drawn uniformly and anew for each epoch; independent noise.

    In T = k·t steps every record takes part exactly k times, which costs less noise than Poisson sampling of the same
    size for the same ε, up to a few percent; no record is missed by chance.

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private_with_epsilon(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     mechanism=ghostclip.mechanisms.BallsInBins(),
        ...     target_epsilon=3.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
        ... )
        >>> print(f"σ = {optimizer.noise_multiplier:.2f}")
        σ = 0.90
    """

    @property
    def theorem(self) -> str:
        """What proves its cost."""
        return "privacy loss distribution of random allocation (Feldman and Shenfeld 2025)"

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return random allocation to round(N / batch_size) steps an epoch."""
        return RandomAllocation(num_samples=num_samples, epoch_steps=steps_per_epoch(batch_size / num_samples))


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(_Independent):
    """Records are dealt out to groups once, and each step draws a Poisson sample from the next group.

    Attributes:
        groups: b, at least 1: a record is in at most one of b steps that follow each other.

    Example:
        >>> scheme = ghostclip.mechanisms.CyclicPoissonSampling(groups=4).scheme(num_samples=1000, batch_size=50)
        >>> scheme.sample_rate, scheme.steps
        (0.2, 20)
    """

    groups: int

    @property
    def theorem(self) -> str:
        """What proves its cost."""
        return "b steps are one Poisson event of b times the rate (Choquette-Choo et al. 2023)"

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return Poisson samples of the groups, of rate b·batch_size / N."""
        groups = positive_int(self.groups, "groups")
        rate = fraction(min(1.0, groups * batch_size / num_samples), "groups * batch_size / num_samples")
        return CyclicPoisson(
            num_samples=num_samples, groups=groups, sample_rate=rate, epoch_steps=groups * steps_per_epoch(rate)
        )


@dataclass(frozen=True, kw_only=True)
class BandedInverse(Mechanism):
    """Correlated noise without a byte of memory: a step takes back a part of the noise of the p - 1 steps before.

    Batches have one size and come in the same order in every epoch; step t adds σ·s·Σ_j c_j·z_{t-j} in units of the
    clipping norm, and earlier z are drawn again from the key instead of being stored. What parameters see are sums of
    steps, in which most of the noise cancels: at equal (ε, δ) much less is left than of independent noise without
    amplification, and less than with Poisson sampling where ε is not small, or records are seen once or twice.
    `ghostclip.mechanisms.plan_privacy` compares.

    Privacy:
        The whole stream of releases is one Gaussian mechanism with noise multiplier σ: s bounds what a record moves
        Cx by in the steps that it takes part in, exactly one in each epoch, `separation` apart. An epoch is charged
        when it begins, with the part of s² that it adds, so that ε of a training that ends early is less. Each step's
        noise belongs to one draw of the loader; a step that draws otherwise is refused before anything is released.

    Attributes:
        bands: p, at least 2.
        epochs: Passes that the noise is for. More are possible: each costs what it adds. `make_private_with_epsilon`
            takes its own `epochs` where this is None.
        coefficients: "optimal" (least error in `epochs`, found numerically), "square_root" (the banded inverse square
            root), or c_1, …, c_{p-1} themselves, as (-0.9,) of DP-λCGD.
        momentum: Of the optimizer, for "optimal" coefficients; 0 for plain steps.

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
    epochs: int | None = None
    coefficients: str | Sequence[float] = "optimal"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if positive_int(self.bands, "bands") < 2:
            raise InvalidOptionError("bands=1: that is independent noise. Use at least 2, or another mechanism.")
        if self.epochs is not None:
            positive_int(self.epochs, "epochs")
        if not 0 <= self.momentum < 1:
            raise InvalidOptionError(f"momentum={self.momentum!r}: must be in [0, 1).")
        if isinstance(self.coefficients, str):
            choice(self.coefficients, "coefficients", ("optimal", "square_root"))
        elif len(self.coefficients) != self.bands - 1:
            raise InvalidOptionError(
                f"coefficients={self.coefficients!r}: {self.bands - 1} are needed for bands={self.bands}, all but the "
                "first one, which is 1."
            )
        else:
            object.__setattr__(self, "coefficients", tuple(float(one) for one in self.coefficients))

    @property
    def theorem(self) -> str:
        """What proves its cost."""
        return "one Gaussian mechanism on the stream (Denisov et al. 2022; sensitivity: Kalinin and Lampert 2024)"

    def scheme(self, num_samples: int, batch_size: int) -> SamplingScheme:
        """Return the same round(N / batch_size) batches in every epoch."""
        return Cyclic(num_samples=num_samples, epoch_steps=steps_per_epoch(batch_size / num_samples))

    def for_epochs(self, epochs: int) -> BandedInverse:
        """Return the mechanism for a number of epochs, unless it is for one already."""
        return self if self.epochs is not None else replace(self, epochs=positive_int(epochs, "epochs"))

    def correlation(self, scheme: SamplingScheme) -> Correlation | None:
        """Return the coefficients, and s."""
        taken = self._coefficients(scheme)
        return Correlation(taken, self._sensitivity(scheme, self._epochs))

    def periods(self, scheme: SamplingScheme, first: int, count: int) -> list[float]:
        """Return s / √(s_e² - s_{e-1}²) of each epoch e."""
        squares = [self._sensitivity(scheme, epoch) ** 2 if epoch else 0.0 for epoch in range(first, first + count + 1)]
        whole = self._sensitivity(scheme, self._epochs)
        return [whole / math.sqrt(more - less) for less, more in pairwise(squares)]

    def error(self, scheme: SamplingScheme, steps: int, *, momentum: float) -> float:
        """Return the error of its noise."""
        return error(self._coefficients(scheme), steps, momentum=momentum) * self._sensitivity(scheme, self._epochs)

    @property
    def _epochs(self) -> int:
        if self.epochs is None:
            raise InvalidOptionError(
                "mechanism BandedInverse(epochs=None): its noise depends on how often a record takes part; give it."
            )
        return self.epochs

    def _coefficients(self, scheme: SamplingScheme) -> tuple[float, ...]:
        if self.coefficients == "square_root":
            return square_root_of_inverse(self.bands)
        if self.coefficients == "optimal":
            return optimal_inverse(self.bands, self._epochs * scheme.steps, scheme.steps, self.momentum)
        return (1.0, *map(float, self.coefficients))

    def _sensitivity(self, scheme: SamplingScheme, epochs: int) -> float:
        return sensitivity(self._coefficients(scheme), epochs * scheme.steps, separation=scheme.steps)
