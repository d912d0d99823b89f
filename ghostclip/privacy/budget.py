"""The costs of releases, and a privacy budget that stops a training before the step that would exceed it.

A `Charge` is a cost as ledgers, budgets and checkpoints carry it: entries of an accountant's history. What they come
to: ε of an account whose noise was discrete, as the accountant says, with the δ that discreteness costs; and what is
asked of an accountant that the user puts in the place of the engine's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

from torch import nn

from ghostclip import _validate
from ghostclip.accounting import Accountant, Bounds, IAccountant
from ghostclip.accounting.calibration import bounding_accountant, most_that_fit
from ghostclip.accounting.history import Charge, Kind, SamplingEvent, checked_others, counted, times
from ghostclip.errors import BudgetExceededError, InvalidOptionError
from ghostclip.noise.exact import Grid


@lru_cache(maxsize=64)
def cost_of(event: SamplingEvent, *, noise_multiplier: float, count: int = 1) -> Charge:
    """Return the charge of ``count`` events with noise multiplier σ, in units of one record's sensitivity."""
    keeper = bounding_accountant(relation=event.relation)
    keeper.record(event, noise_multiplier=noise_multiplier, count=count)
    return charges_of(keeper)[0]


def charges_of(accountant: Accountant) -> list[Charge]:
    """Return everything that an accountant has recorded, Poisson steps first."""
    accountant.check()
    return [cast("Charge", tuple(entry)) for entry in (*accountant.history, *accountant.others)]


def lacking(charges: Iterable[Charge], others: Iterable[Charge]) -> list[Charge]:
    """Return the charges that are not among ``others``, equal ones as one."""
    return [times(kind, count) for kind, count in (counted(charges) - counted(others)).items()]


def replace_charges(accountant: Accountant, charges: Sequence[Charge]) -> None:
    """Replace all that an accountant has recorded by charges, in their order."""
    accountant.history = [charge for charge in charges if not isinstance(charge[0], str)]
    accountant.others = [charge for charge in charges if isinstance(charge[0], str)]


def accountant_of(accountant: Accountant, charges: Sequence[Charge]) -> Accountant:
    """Return a new accountant of the same kind and relation with these charges only."""
    other = bounding_accountant(accountant.mechanism(), relation=accountant.relation)
    replace_charges(other, charges)
    return other


def checked_charge(values: Sequence[Any]) -> Charge:
    """Return a charge that was read from a file as three plain values."""
    if isinstance(values[0], str):
        return checked_others([values], where="ledger")[0]
    sigma, rate, count = values
    return float(sigma), float(rate), int(count)


MIN_SCALE = 4.0
"""From here on exp(-2π²s²) < 1e-137 is neglected beside a bound that is loose by a factor of 1.8."""


def discretisation_delta(epsilon: float, *, scale: float, coordinates: int, steps: int) -> float:
    """Return the δ to add to an (ε, δ) of continuous Gaussian noise when the noise was discrete.

    δ' = (1 + e^ε)·√(d·T / 640) / s² for T steps that each add N_Z(0, s²) to d integers, s ≥ `MIN_SCALE`.

    A continuous Gaussian rounded to integers and added to an integer sum is post-processing of the continuous
    mechanism, whatever the sampling and the accountant. The discrete Gaussian differs from it by a Kullback-Leibler
    divergence of at most 1/(320 s⁴) in one coordinate: with p_r(x) = φ_s(x)·E_u[exp(-u²/2s²)·cosh(xu/s²)], u uniform in
    [-1/2, 1/2], Jensen's inequality and log cosh y ≥ y²/2 - y⁴/12 give

        KL(N_Z(0, s²), p_r) ≤ (1 - E x²/s²)/(24 s²) + E x⁴/(960 s⁸) ≤ 3/(960 s⁴) + O(exp(-2π²s²)).

    The divergences of all coordinates and steps add up, adaptively chosen sums included; Pinsker's inequality turns
    them into a total variation τ, and (ε, δ) into (ε, δ + (1 + e^ε)·τ).

    Privacy:
        An upper bound, so that any accountant of the continuous Gaussian is a guarantee for noise of level "exact".
        (Rényi divergences of whole orders need no such term.)

    Reference:
        Canonne, Kamath and Steinke (2020), The Discrete Gaussian for Differential Privacy, for N_Z and its moments.
    """
    log_distance = 0.5 * math.log(coordinates * steps / 640) - 2 * math.log(scale)
    log_delta = epsilon + math.log1p(math.exp(-epsilon)) + log_distance
    return math.exp(min(0.0, log_delta))


STEPS_PER_BOUND = Grid.for_norm(1.0).bound
"""C in steps of the grid that releases are rounded to."""

_ROUNDS = 20
_MARGIN = 1e-3


def released_bounds(accountant: Accountant, delta: float, *, coordinates: int) -> Bounds:
    """Return bounds on the ε of an account, discrete noise included.

    With s = σ·2^24 for the smallest σ of the account, d coordinates and T steps, discreteness costs at most
    δ'(ε) = (1 + e^ε)·√(d·T / 640) / s². The result is an ε with ε_continuous(δ - δ'(ε₀)) = ε for some ε₀ ≥ ε: as δ'
    grows with ε, the account is (ε, δ - δ'(ε₀) + δ'(ε))-private, and so (ε, δ)-private.

    Privacy:
        The upper bound holds whatever part of the account was released with discrete noise: all of it counts as such.
        The lower one is that of continuous noise.
    """
    bounds = accountant.epsilon_bounds(delta)
    noisy = [(sigma, count) for sigma, count in _sigmas(accountant) if 0 < sigma < math.inf]
    if not coordinates or not noisy or math.isinf(bounds.upper):
        return bounds
    scale, steps = min(sigma for sigma, _ in noisy) * STEPS_PER_BOUND, sum(count for _, count in noisy)
    upper = bounds.upper
    for _ in range(_ROUNDS if scale >= MIN_SCALE else 0):
        guess = upper * (1 + _MARGIN) + 1e-9
        cost = discretisation_delta(guess, scale=scale, coordinates=coordinates, steps=steps)
        left = math.nextafter(delta - cost, 0.0)
        if left <= 0:
            break
        upper = accountant.get_epsilon(left)
        if upper <= guess:
            return Bounds(min(bounds.lower, upper), upper)
    return Bounds(bounds.lower, math.inf)


def coordinates_of(module: nn.Module, noise_level: str) -> int:
    """Return how many numbers a release with discrete noise has; 0 for continuous noise."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad) if noise_level == "exact" else 0


def _sigmas(accountant: Accountant) -> Iterator[tuple[float, int]]:
    """Yield (σ, number) of all noisy steps."""
    for first, second, count in charges_of(accountant):
        if first == "truncated_poisson":
            yield cast("tuple[float, ...]", second)[0], count
        elif first == "allocation":
            sigma, steps = cast("tuple[float, ...]", second)
            yield sigma, count * int(steps)
        elif not isinstance(first, str):
            yield first, count


_METHODS = ("step", "get_epsilon", "__len__", "mechanism")


def refuse_unfit(accountant: IAccountant) -> None:
    """Refuse an accountant without Opacus's four methods, or with steps already."""
    missing = [name for name in _METHODS if not callable(getattr(accountant, name, None))]
    if missing:
        raise InvalidOptionError(
            f"accountant {type(accountant).__name__}: has no {', '.join(missing)}. Derive it from "
            "ghostclip.accounting.IAccountant."
        )
    if len(accountant) > 0:
        raise InvalidOptionError(
            f"accountant {type(accountant).__name__}: holds {len(accountant)} steps that this engine's account does "
            "not. Set one without steps; it is told of those that were released."
        )


def refuse_unsupported(custom: IAccountant | None, charges: Sequence[Charge]) -> None:
    """Refuse charges that an accountant with four methods cannot represent."""
    strange = () if custom is None else [charge[0] for charge in charges if isinstance(charge[0], str)]
    if strange:
        raise InvalidOptionError(
            f"accountant {type(custom).__name__}: step() takes Poisson samples, not releases of kind "
            f"{strange[0]!r}. Leave the engine its own, or derive yours from ghostclip.accounting.Accountant."
        )


def record_charges(custom: IAccountant | None, charges: Sequence[Charge]) -> None:
    """Record releases in an accountant of Opacus's four methods, if there is one."""
    if custom is None:
        return
    for first, second, count in charges:
        for _ in range(count):
            custom.step(noise_multiplier=first, sample_rate=second)  # type: ignore[arg-type]  # refused where it is no σ


def replace_history(custom: IAccountant | None, accountant: Accountant) -> None:
    """Replace the history of an accountant with four methods by that of a loaded account."""
    if custom is None:
        return
    charges = charges_of(accountant)
    refuse_unsupported(custom, charges)
    if len(custom) == 0:
        record_charges(custom, charges)
    else:
        custom.load_state_dict({"history": accountant.history, "mechanism": custom.mechanism()})


_MOST_STEPS = 2**40


class Budget:
    """ε and δ that must not be exceeded by all that an engine releases.

    How many steps fit is worked out once for a noise multiplier and a sampling rate, and again only when they change
    (or when a checkpoint is loaded); with a schedule that changes σ in every step, each step is checked by itself.

    Privacy:
        The check comes before noise is drawn: the step that does not fit releases nothing. What the accountant says is
        an upper bound, so the budget is kept.

    Args:
        epsilon: ε, above 0.
        delta: δ, in (0, 1).
        when_spent: "raise" an error at the step that does not fit, or "stop": that step and all later ones do nothing,
            and the private loader hands out no further batch.

    Attributes:
        spent: Whether a step was refused.
        coordinates: Most numbers of one release with discrete noise; 0 for continuous noise.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    def __init__(self, epsilon: float, delta: float, *, when_spent: str = "raise") -> None:
        self.epsilon = _validate.positive(epsilon, "epsilon")
        self.delta = _validate.probability(delta, "delta")
        self.when_spent = _validate.choice(when_spent, "when_spent", ("raise", "stop"))
        self.spent = False
        self.coordinates = 0
        self._left: int | None = None  # steps of `_kind` that still fit; None until computed
        self._seen = 0  # releases in the account when that was computed
        self._kind: Kind | None = None  # kind of the latest step
        self._known: Charge | None = None  # a charge that fits by construction
        self._excluded = Counter[Kind]()  # charges from before this budget

    def exclude(self, charges: Sequence[Charge]) -> None:
        """Leave out what an account held before this budget began.

        Args:
            charges: The account so far.
        """
        self._excluded = counted(charges)

    def known_to_fit(self, charge: Charge) -> None:
        """Set a charge that fits, because the noise was chosen for it, so that it need not be computed.

        Args:
            charge: Fits in the whole budget.
        """
        self._known = charge

    def forget(self) -> None:
        """Forget how many steps fit, as the account was replaced."""
        self._left, self._kind, self.spent = None, None, False
        self._excluded = Counter()

    def fits(self, accountant: Accountant, charges: Sequence[Charge]) -> bool:
        """Return whether charges can be added to an account.

        Args:
            accountant: Holds what was released before.
            charges: What a step is about to add.

        Returns:
            Whether ε stays within the budget.
        """
        if not charges:
            return True
        if len(accountant) != self._seen:
            # Something else was recorded meanwhile: what was worked out is of another account.
            self._left, self._kind, self._seen = None, None, len(accountant)
        more = counted(charges)
        if len(more) > 1:
            self._left, self._kind = None, None
            return self._within(accountant, charges)
        ((kind, steps),) = more.items()
        if kind != self._kind:
            self._kind, self._left = kind, self._left_of_known(accountant, kind)
            if self._left is None:
                # Once for every σ of a schedule; counted out only when the same comes a second time.
                return self._within(accountant, charges)
        if self._left is None or (steps > self._left and self._known is not None):
            self._known = None
            # Once for a kind of step.
            self._left = most_that_fit(lambda number: self._within(accountant, [times(kind, number)]), most=_MOST_STEPS)
        return steps <= self._left

    def _left_of_known(self, accountant: Accountant, kind: Kind) -> int | None:
        """Return how many of the steps known to fit are left; None if the account holds anything else."""
        if self._known is None or self._known[:2] != kind:
            return None
        counts = self._counted(accountant)
        return None if counts.keys() - {kind} else self._known[2] - counts[kind]

    def _counted(self, accountant: Accountant) -> Counter[Kind]:
        """Return the account's charges, without what is excluded."""
        return counted(charges_of(accountant)) - self._excluded

    def charge(self, accountant: Accountant, charges: Sequence[Charge]) -> None:
        """Subtract charges that were added to the account from the steps left.

        Args:
            accountant: Holds them already.
            charges: What `fits` was asked about.
        """
        self._seen = len(accountant)
        if self._left is not None:
            self._left -= sum(charge[2] for charge in charges)

    def require(self, accountant: Accountant, charges: Sequence[Charge], *, held: str = "") -> None:
        """Refuse charges that do not fit.

        Args:
            accountant: Holds what was released before.
            charges: What a step is about to add.
            held: Where the account's steps are written, in brackets, for the message.

        Raises:
            BudgetExceededError: If they do not fit.
        """
        if self.fits(accountant, charges):
            return
        self.spent = True
        sigma = charges[0][0]
        noise = f"={sigma!r}" if isinstance(sigma, float) else ""
        raise BudgetExceededError(
            f"budget of ε = {self.epsilon:g} at δ = {self.delta:g}: {len(accountant)} steps are accounted for{held} "
            "and the next does not fit; nothing of it was released. Stop here (when_spent='stop' does so by itself), "
            "or resume from a checkpoint with a larger ε and the noise as it was "
            f"(noise_multiplier{noise}). A step after several backwards costs as much as one with that many times less "
            "noise: to cut one batch, use BatchMemoryManager."
        )

    def _within(self, accountant: Accountant, more: Sequence[Charge]) -> bool:
        """Return whether ε stays within the budget after some more steps."""
        charges = [times(kind, count) for kind, count in self._counted(accountant).items()]
        longer = accountant_of(accountant, [*charges, *more])
        return released_bounds(longer, self.delta, coordinates=self.coordinates).upper <= self.epsilon
