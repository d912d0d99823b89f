"""What all accountants share: the interface, which users implement too, the history, and the whole privacy profile."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from ghostclip._validate import positive_int
from ghostclip.accounting.history import (
    Charge,
    Entry,
    History,
    Kind,
    OtherEntry,
    SamplingEvent,
    allocation_entry,
    checked_history,
    checked_noise_multiplier,
    checked_others,
    checked_relation,
    checked_sample_rate,
    counted,
    joined,
    times,
    totals,
    truncated_entry,
)
from ghostclip.accounting.solve import Bounds
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
        _require_complete(state_dict)
        if state_dict["mechanism"] != self.mechanism():
            raise InvalidOptionError(
                f"accountant state: of mechanism {state_dict['mechanism']!r}, this is {self.mechanism()!r}."
            )
        self.history = checked_history(state_dict["history"], where="accountant state")


class Accountant(IAccountant):
    """History of released steps, and the (ε, δ) that it satisfies.

    Privacy:
        A step is one draw of N(0, (σC)²) added to a sum over a Poisson sample of rate q in which every record moves
        the sum by at most C. A batch that always holds every record, or one pass over shuffled batches, is a step with
        q = 1. Losses, batch sizes and norms are not covered.
    """

    def __init__(self, *, relation: str = "zero_out") -> None:
        # Poisson steps as (σ, q, steps); equal consecutive steps share an entry
        super().__init__()
        self.relation = checked_relation(relation)
        self.others: list[OtherEntry] = []  # all other releases as (kind, parameters, times)
        self._held = Counter[Kind]()

    def hold(self, released: Counter[Kind]) -> None:
        """Set the counts that an engine has released, which the engine updates."""
        # A shorter history is refused from then on.
        self._held = released

    def lacking(self) -> Counter[Kind]:
        """Return the releases of the engine that are missing in this history, as numbers by kind."""
        return self._held - counted((*self.history, *self.others))

    def require_whole(self) -> None:
        """Refuse a history that lacks what the engine has released: emptied, shortened or changed by hand."""
        lacking = self.lacking()
        if lacking:
            kind, count = next(iter(lacking.items()))
            raise InvalidOptionError(
                f"accountant: its history lacks {sum(lacking.values())} releases that this engine has made or loaded "
                f"({count} of {kind}, among others): it was emptied, shortened or changed by hand. Put them back; for "
                "a training that shares no record with this one, make a PrivacyEngine of its own."
            )

    @abc.abstractmethod
    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return bounds of the ε spent so far; the upper one is the guarantee."""

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on the ε spent so far; inf only if steps without noise reveal more than δ."""
        return self.epsilon_bounds(delta).upper

    def whole_history(self) -> History:
        """Return the checked history, equal releases as one entry."""
        # Refuse one that was changed by hand or is incomplete.
        self.check()
        self.require_whole()
        return totals(self.history, self.others, self.relation)

    def check(self) -> None:
        """Refuse entries that no release has made, since `history` and `others` can be written to."""
        where = type(self).__name__
        checked_relation(self.relation)
        checked_history(self.history, where=where)
        checked_others(self.others, where=where)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one Poisson-sampled Gaussian release; without sampling, q is 1."""
        # Several releases on one batch are one step with σ^-2 = Σ σ_i^-2.
        self.add((checked_noise_multiplier(noise_multiplier), checked_sample_rate(sample_rate), 1))

    def record(self, event: SamplingEvent, *, noise_multiplier: float, count: int = 1) -> None:
        """Record releases as a sampler describes them, σ in units of one record's sensitivity; of rounds one each."""
        sigma = checked_noise_multiplier(noise_multiplier) / event.records_per_unit
        count = positive_int(count, "count")
        if event.kind == "truncated_poisson":
            if event.relation != self.relation:
                raise InvalidOptionError(
                    f"event with relation={event.relation!r}: this accountant's is {self.relation!r}, and truncated "
                    "batches cost differently under the two. Create the accountant with the event's relation."
                )
            entry = truncated_entry(sigma, event.sample_rate, event.num_units, event.truncation or 0)
            self.add(("truncated_poisson", entry, count))
        elif event.kind == "allocation" and event.steps_per_event > 1:
            # k of T steps cost at most what k rounds of one of T/k steps do.
            each = event.steps_per_event // event.participations
            self.add(("allocation", allocation_entry(sigma, each), count * event.participations))
        else:
            self.add((sigma, event.sample_rate, count))

    def add(self, charge: Charge) -> None:
        """Record releases as an entry of the history, which is not checked."""
        entries: list[Any] = self.others if isinstance(charge[0], str) else self.history
        entries[-1:] = joined([*entries[-1:], charge])

    def __len__(self) -> int:
        return sum(entry[2] for entry in (*self.history, *self.others))

    def __bool__(self) -> bool:
        """Return True: an accountant without steps is still an accountant."""
        return True

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Return the history as plain Python values."""
        self.check()
        state = super().state_dict(destination)
        state["relation"] = self.relation
        if self.others:
            state["others"] = list(self.others)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history by a saved one, of this or another accountant under the same relation.

        Privacy:
            What an engine has released and the saved history lacks stays counted: going back lowers nothing.
        """
        _require_complete(state_dict)
        relation = checked_relation(state_dict.get("relation", "zero_out"))
        if relation != self.relation:
            raise InvalidOptionError(
                f"accountant state: saved for relation={relation!r}, this is {self.relation!r}; create the accountant "
                "with the saved one."
            )
        history = checked_history(state_dict["history"], where="accountant state")
        others = checked_others(state_dict.get("others", ()), where="accountant state")
        self.history, self.others = history, others
        for kind, count in self.lacking().items():
            self.add(times(kind, count))


def _require_complete(state_dict: Mapping[str, Any]) -> None:
    missing = [key for key in ("history", "mechanism") if not state_dict or key not in state_dict]
    if missing:
        raise InvalidOptionError(f"accountant state: missing {', '.join(missing)}; pass what state_dict() returned.")
