"""The interface of accountants, which users implement too: what Opacus's accountants can do."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from ghostclip.accounting.history import Entry, checked_history, checked_sample_rate
from ghostclip.errors import InvalidOptionError


class NoisyOptimizer(Protocol):
    """Optimizer as far as the step hook reads it."""

    noise_multiplier: float


class IAccountant(abc.ABC):
    """Interface of an accountant of Opacus's kind; users implement four methods."""

    def __init__(self) -> None:
        self.history: list[Entry] = []  # steps as (σ, q, number), for accountants that store them there

    @abc.abstractmethod
    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one release.

        Args:
            noise_multiplier: σ, the standard deviation of the noise in units of the sensitivity.
            sample_rate: q, the probability of each record to be in the batch.
        """

    @abc.abstractmethod
    def get_epsilon(self, delta: float) -> float:
        """Return the ε spent so far.

        Args:
            delta: δ at which ε is wanted.

        Returns:
            An upper bound on ε.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of recorded steps."""

    @classmethod
    @abc.abstractmethod
    def mechanism(cls) -> str:
        """Return the name under which `create_accountant` finds this accountant."""

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[NoisyOptimizer], None]:
        """Return an optimizer step hook that records a step.

        Args:
            sample_rate: q, the probability of each record to be in a batch.

        Returns:
            A function of the optimizer, called once per step.

        Privacy:
            An optimizer that puts k backward passes under one noise draw (attribute `accumulated_iterations` = k) is
            recorded as a step with σ/k and rate min(1, k·q). A record contributes to any of the k passes with
            probability at most k·q, and then by at most k·C; this covers k passes over one batch as well as k
            independently drawn batches. A step with σ and k·q, as is often reported, covers neither.
        """
        rate = checked_sample_rate(sample_rate)

        def hook(optimizer: NoisyOptimizer) -> None:
            passes = int(getattr(optimizer, "accumulated_iterations", 1))
            if passes < 1:
                raise InvalidOptionError(f"accumulated_iterations={passes}: a step releases at least one pass.")
            self.step(noise_multiplier=optimizer.noise_multiplier / passes, sample_rate=min(1.0, rate * passes))

        return hook

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Return the state for `load_state_dict`: `history` and `mechanism`, in ``destination`` if there is one."""
        state = {} if destination is None else destination
        state["history"] = list(self.history)
        state["mechanism"] = self.mechanism()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore saved steps; refuse a state that is incomplete, out of range or of another mechanism."""
        missing = [key for key in ("history", "mechanism") if not state_dict or key not in state_dict]
        if missing:
            raise InvalidOptionError(
                f"accountant state: missing {', '.join(missing)}; pass what state_dict() returned."
            )
        if state_dict["mechanism"] != self.mechanism():
            raise InvalidOptionError(
                f"accountant state: of mechanism {state_dict['mechanism']!r}, this is {self.mechanism()!r}."
            )
        self.history = checked_history(state_dict["history"], where="accountant state")
