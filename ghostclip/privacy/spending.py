"""What an engine says about its account: ε from both sides, the budget, and what the guarantee means."""

from __future__ import annotations

import warnings

from ghostclip.accounting import Bounds, IAccountant, delta_too_large
from ghostclip.assembly.compatibility import Compatibility
from ghostclip.privacy.account import Account
from ghostclip.privacy.own_accountant import install
from ghostclip.privacy.sampling_plan import SamplingPlan
from ghostclip.privacy.summary import summary_text


class Spending(Compatibility):
    """The reading side of an engine.

    Attributes:
        noise_level: "fast", "secure" or "exact".

    Args:
        account: What is released is charged to.
        noise_level: Of the noise.
    """

    def __init__(self, account: Account, *, noise_level: str) -> None:
        self.noise_level = noise_level
        self._account = account
        self._plan: SamplingPlan | None = None
        self._warned_of_delta = False

    @property
    def secure_mode(self) -> bool:
        """Whether noise comes from a cryptographic keystream."""
        return self.noise_level != "fast"

    @property
    def accountant(self) -> IAccountant:
        """Turns what was released into ε; for noise_level="exact" `get_epsilon` adds what discreteness costs.

        It may be set to another, also to one of the user's with Opacus's four methods (`IAccountant`), whose ε
        `get_epsilon` then returns; `epsilon_bounds`, `summary` and budgets go by bounds that are proved.
        """
        return self._account.accountant if self._account.own is None else self._account.own

    @accountant.setter
    def accountant(self, accountant: IAccountant) -> None:
        install(self._account, accountant)

    @property
    def budget_spent(self) -> bool:
        """Whether a budget with `when_spent="stop"` has ended the training."""
        return self._account.spent

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on what was released so far.

        Args:
            delta: δ that ε is meant at; well below 1/N, else it warns.

        Returns:
            ε; of an accountant of the user's what it says.

        Raises:
            InvalidOptionError: If δ is not in (0, 1), or below what the discreteness of exact noise costs.
        """
        if self._account.own is not None:
            self._warn_of(delta, self._plan)
            return self._account.own.get_epsilon(delta)
        return self.epsilon_bounds(delta).upper

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return bounds from both sides on what was released so far.

        Args:
            delta: δ that ε is meant at.

        Returns:
            The bounds; the upper one is the guarantee, no accountant can go below the lower one (for "exact" noise:
            that of continuous noise).

        Raises:
            InvalidOptionError: If δ is not in (0, 1), or below what the discreteness of exact noise costs.
        """
        bounds = self._account.epsilon_bounds(delta)
        self._warn_of(delta, self._plan)
        return bounds

    def summary(self, delta: float) -> str:
        """Return what the guarantee says: ε, δ, neighbouring data sets, sampling, noise, and what is not covered.

        Args:
            delta: δ that ε is meant at.

        Returns:
            One line.
        """
        return summary_text(
            self.epsilon_bounds(delta),
            delta,
            releases=len(self._account.accountant),
            level=self.noise_level,
            plan=self._plan,
            unchecked=[str(unchecked) for unchecked in self._account.unchecked],
        )

    def _warn_of(self, delta: float, plan: SamplingPlan | None) -> None:
        """Warn once of a δ that promises nothing; how many units there are is public."""
        text = None if plan is None or self._warned_of_delta else delta_too_large(delta, plan.event.num_units)
        if text is not None:
            self._warned_of_delta = True
            warnings.warn(text, stacklevel=4)
