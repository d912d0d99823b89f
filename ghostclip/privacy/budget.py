"""A privacy budget that stops a training before the step that would exceed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ghostclip import _validate
from ghostclip.accounting import Accountant
from ghostclip.accounting.history import Charge, Kind, counted, times
from ghostclip.errors import BudgetExceededError
from ghostclip.privacy.charges import accountant_of, charges_of, released_bounds

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
        self._left: int | None = None
        self._seen = 0
        self._kind: Kind | None = None
        self._known: Charge | None = None
        self._excluded = Counter[Kind]()

    def exclude(self, charges: Sequence[Charge]) -> None:
        """Leave out what an account held before this budget began.

        Args:
            charges: The account so far.
        """
        self._excluded = counted(charges)

    def known_to_fit(self, charge: Charge) -> None:
        """Say what is known to fit, because the noise was chosen for it; saves working it out.

        Args:
            charge: Fits in the whole budget.
        """
        self._known = charge

    def forget(self) -> None:
        """Work out anew how many steps fit, of all that is in the account: it was replaced."""
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
            self._left = self._count(accountant, kind)
        return steps <= self._left

    def _left_of_known(self, accountant: Accountant, kind: Kind) -> int | None:
        """Return how many of the steps that are known to fit are left, or None if the account has anything else."""
        if self._known is None or self._known[:2] != kind:
            return None
        counts = self._counted(accountant)
        return None if counts.keys() - {kind} else self._known[2] - counts[kind]

    def _counted(self, accountant: Accountant) -> Counter[Kind]:
        """Return the account's charges, without what is excluded."""
        return counted(charges_of(accountant)) - self._excluded

    def charge(self, accountant: Accountant, charges: Sequence[Charge]) -> None:
        """Take note of charges that were added to the account.

        Args:
            accountant: Holds them already.
            charges: What `fits` was asked about.
        """
        self._seen = len(accountant)
        if self._left is not None:
            self._left -= sum(charge[2] for charge in charges)

    def require(self, accountant: Accountant, charges: Sequence[Charge], *, held: str = "") -> None:
        """Refuse events that do not fit.

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

    def _count(self, accountant: Accountant, kind: Kind) -> int:
        """Return how many equal steps fit, by doubling and halving."""
        fits, fails = 0, 1
        while fails <= _MOST_STEPS and self._within(accountant, [times(kind, fails)]):
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._within(accountant, [times(kind, middle)]):
                fits = middle
            else:
                fails = middle
        return fits
