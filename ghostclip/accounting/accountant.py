"""The interface that every accountant has, and the ledger they share."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from ghostclip.accounting.ledger import Entry, checked_history, checked_noise_multiplier, checked_sample_rate
from ghostclip.errors import InvalidOptionError


class NoisyOptimizer(Protocol):
    """What the step hook reads from an optimizer."""

    noise_multiplier: float


class Accountant(abc.ABC):
    """Keeps the ledger of released steps and turns it into (ε, δ).

    Privacy:
        A step is one draw of N(0, (σC)²) added to a sum over a Poisson sample of rate q in which every record moves
        the sum by at most C. The bound holds for neighbouring data sets that differ by one record added, removed,
        or replaced by a record without contribution. Losses, batch sizes and norms are not covered.

    Attributes:
        history: Ledger as (σ, q, steps); equal consecutive steps share an entry.
    """

    def __init__(self) -> None:
        """Start with an empty ledger."""
        self.history: list[Entry] = []

    @classmethod
    @abc.abstractmethod
    def mechanism(cls) -> str:
        """Return the name under which `create_accountant` finds this accountant."""

    @abc.abstractmethod
    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on the ε spent so far.

        Args:
            delta: Probability that the ε bound may fail, in (0, 1).

        Returns:
            ε ≥ 0; inf only if some step had no noise.
        """

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one release, in constant time.

        Args:
            noise_multiplier: σ, the standard deviation of the noise over the sensitivity.
            sample_rate: q, the probability with which each record joined the batch.

        Raises:
            InvalidOptionError: If a value is out of range; nothing is recorded then.
        """
        self._record(checked_noise_multiplier(noise_multiplier), checked_sample_rate(sample_rate), 1)

    def _record(self, sigma: float, rate: float, steps: int) -> None:
        if self.history and self.history[-1][0] == sigma and self.history[-1][1] == rate:
            steps += self.history.pop()[2]
        self.history.append((sigma, rate, steps))

    def __len__(self) -> int:
        """Return the number of steps recorded."""
        return sum(steps for _, _, steps in self.history)

    def __bool__(self) -> bool:
        """Return True: an accountant without steps is still an accountant."""
        return True

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[NoisyOptimizer], None]:
        """Return a function that records a step each time an optimizer calls it.

        Privacy:
            An optimizer that adds k Poisson batches under one noise draw (attribute `accumulated_iterations` = k) is
            recorded as k steps at σ/√k: the draw is a sum of k independent ones, so this bound holds although a
            record may be in several of the k batches. Reporting one step at rate k·q would not.

        Args:
            sample_rate: q of one batch.

        Returns:
            Function of the optimizer.

        Raises:
            InvalidOptionError: If q is not a probability.
        """
        rate = checked_sample_rate(sample_rate)

        def hook(optimizer: NoisyOptimizer) -> None:
            batches = int(getattr(optimizer, "accumulated_iterations", 1))
            if batches < 1:
                raise InvalidOptionError(f"accumulated_iterations={batches}: a step releases at least one batch.")
            sigma = checked_noise_multiplier(optimizer.noise_multiplier)
            self._record(sigma / math.sqrt(batches), rate, batches)

        return hook

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Return the ledger as plain Python values.

        Args:
            destination: Mapping to fill; a new dict by default.

        Returns:
            Mapping with the keys `history` and `mechanism`.
        """
        state = {} if destination is None else destination
        state["history"] = list(self.history)
        state["mechanism"] = self.mechanism()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the ledger by a saved one.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            InvalidOptionError: If it is empty, incomplete, out of range, or of another mechanism.
        """
        missing = [key for key in ("history", "mechanism") if not state_dict or key not in state_dict]
        if missing:
            raise InvalidOptionError(
                f"accountant state: missing {', '.join(missing)}; pass what state_dict() returned."
            )
        if state_dict["mechanism"] != self.mechanism():
            raise InvalidOptionError(
                f"accountant state: saved by {state_dict['mechanism']!r}, this is {self.mechanism()!r}; "
                "create the accountant by the saved name."
            )
        self.history = checked_history(state_dict["history"], where="accountant state")
