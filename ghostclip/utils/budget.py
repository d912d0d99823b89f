"""A privacy budget that stops a training before the step that would exceed it."""

from __future__ import annotations

from collections.abc import Sequence

from ghostclip import _validate
from ghostclip.accounting import Accountant, create_accountant
from ghostclip.errors import BudgetExceededError
from ghostclip.utils.ledger_file import Event

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

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    def __init__(self, epsilon: float, delta: float, *, when_spent: str = "raise") -> None:
        self.epsilon = _validate.positive(epsilon, "epsilon")
        self.delta = _validate.probability(delta, "delta")
        self.when_spent = _validate.choice(when_spent, "when_spent", ("raise", "stop"))
        self.spent = False
        self._left: int | None = None
        self._event: tuple[float, float] | None = None
        self._planned: tuple[float, float, int] | None = None
        self._excluded: list[Event] = []

    def exclude(self, history: Sequence[Event]) -> None:
        """Leave out what an account held before this budget began.

        Args:
            history: The account's entries so far.
        """
        self._excluded = [(sigma, rate, steps) for sigma, rate, steps in history]

    def plan(self, noise_multiplier: float, sample_rate: float, steps: int) -> None:
        """Say what is known to fit, because the noise was chosen for it; saves working it out.

        Args:
            noise_multiplier: σ.
            sample_rate: q.
            steps: How many steps with both fit in the whole budget.
        """
        self._planned = (noise_multiplier, sample_rate, steps)

    def forget(self) -> None:
        """Work out anew how many steps fit, of all that is in the account: it was replaced."""
        self._left, self._event, self.spent = None, None, False
        self._excluded.clear()

    def fits(self, accountant: Accountant, events: Sequence[Event]) -> bool:
        """Return whether events can be added to an account.

        Args:
            accountant: Holds what was released before.
            events: (σ, q, number) of the events that a step is about to add.

        Returns:
            Whether ε stays within the budget.
        """
        if not events:
            return True
        kinds = {event[:2] for event in events}
        steps = sum(event[2] for event in events)
        if len(kinds) > 1:
            self._left, self._event = None, None
            return self._within(accountant, events)
        kind = kinds.pop()
        if kind != self._event:
            self._event, self._left = kind, self._left_of_plan(accountant, kind)
            if self._left is None:
                # Once for every σ of a schedule; counted out only when the same comes a second time.
                return self._within(accountant, [(*kind, steps)])
        if self._left is None or (steps > self._left and self._planned is not None):
            self._planned = None
            self._left = self._count(accountant, kind)
        return steps <= self._left

    def _left_of_plan(self, accountant: Accountant, kind: tuple[float, float]) -> int | None:
        """Return how many steps of the plan are left, or None if the account holds anything else."""
        if self._planned is None or self._planned[:2] != kind:
            return None
        history = self._counted(accountant)
        others = [entry for entry in history if entry[:2] != kind]
        return None if others else self._planned[2] - sum(entry[2] for entry in history)

    def _counted(self, accountant: Accountant) -> list[Event]:
        """Return the account's entries without those that are left out; an entry may have grown since."""
        history: list[Event] = [(sigma, rate, steps) for sigma, rate, steps in accountant.history]
        if not self._excluded:
            return history
        place = len(self._excluded) - 1
        sigma, rate, steps = history[place]
        more = steps - self._excluded[place][2]
        return [*([(sigma, rate, more)] if more else []), *history[place + 1 :]]

    def charge(self, events: Sequence[Event]) -> None:
        """Take note of events that were added to the account.

        Args:
            events: What `fits` was asked about.
        """
        if self._left is not None:
            self._left -= sum(event[2] for event in events)

    def require(self, accountant: Accountant, events: Sequence[Event]) -> None:
        """Refuse events that do not fit.

        Args:
            accountant: Holds what was released before.
            events: (σ, q, number) of the events that a step is about to add.

        Raises:
            BudgetExceededError: If they do not fit.
        """
        if self.fits(accountant, events):
            return
        self.spent = True
        raise BudgetExceededError(
            f"budget of ε = {self.epsilon:g} at δ = {self.delta:g}: {len(accountant)} steps are accounted for and the "
            "next does not fit; nothing of it was released. Stop here, or use Budget(..., when_spent='stop')."
        )

    def _within(self, accountant: Accountant, more: Sequence[Event]) -> bool:
        """Return whether ε stays within the budget after some more steps."""
        longer = create_accountant(accountant.mechanism())
        longer.history = [*self._counted(accountant), *more]
        return longer.get_epsilon(self.delta) <= self.epsilon

    def _count(self, accountant: Accountant, kind: tuple[float, float]) -> int:
        """Return how many equal events fit, by doubling and halving."""
        fits, fails = 0, 1
        while fails <= _MOST_STEPS and self._within(accountant, [(*kind, fails)]):
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._within(accountant, [(*kind, middle)]):
                fits = middle
            else:
                fails = middle
        return fits
