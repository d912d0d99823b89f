"""The history that all accountants of this package share."""

from __future__ import annotations

import abc
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

from ghostclip._validate import positive_int
from ghostclip.accounting.events import SamplingEvent
from ghostclip.accounting.history import (
    History,
    Kind,
    OtherEntry,
    allocation_entry,
    checked_history,
    checked_noise_multiplier,
    checked_others,
    checked_relation,
    checked_sample_rate,
    guarantee_entry,
    totals,
    truncated_entry,
)
from ghostclip.accounting.interface import IAccountant
from ghostclip.accounting.solve import Bounds
from ghostclip.errors import InvalidOptionError


class Accountant(IAccountant):
    """Keeps the history of released steps and turns it into (ε, δ).

    Privacy:
        A step is one draw of N(0, (σC)²) added to a sum over a Poisson sample of rate q in which every record moves
        the sum by at most C. A batch that always holds every record, or one pass over shuffled batches, is a step with
        q = 1. Losses, batch sizes and norms are not covered.

    Attributes:
        relation: What neighbouring data sets are.
        history: Poisson steps as (σ, q, steps); equal consecutive steps share an entry.
        others: Everything else as (kind, parameters, times).
    """

    def __init__(self, *, relation: str = "zero_out") -> None:
        """Make an accountant with an empty history.

        Args:
            relation: What neighbouring data sets are: one record replaced by one without contribution ("zero_out"),
                added or removed ("add_remove"; the same cost on Poisson samples), or replaced by any
                ("replace_one").
        """
        super().__init__()
        self.relation = checked_relation(relation)
        self.others: list[OtherEntry] = []
        self._held: Mapping[Kind, int] = {}

    def hold(self, released: Mapping[Kind, int]) -> None:
        """Never go below what an engine has released: an emptied or shortened history is refused when ε is asked for.

        Args:
            released: Numbers by kind, (σ, q) or (kind, parameters); the engine keeps adding to this mapping.
        """
        self._held = released

    def lacking(self) -> dict[Kind, int]:
        """Return what the engine has released and this history does not hold, as numbers by kind."""
        there: dict[Kind, int] = {}
        for first, second, count in (*self.history, *self.others):
            kind = cast("Kind", (first, second))
            there[kind] = there.get(kind, 0) + count
        missing = {kind: count - there.get(kind, 0) for kind, count in self._held.items()}
        return {kind: count for kind, count in missing.items() if count > 0}

    def require_whole(self) -> None:
        """Refuse a history that lacks what the engine has released.

        Raises:
            InvalidOptionError: If it was emptied, shortened or changed by hand.
        """
        lacking = self.lacking() if self._held else {}
        if lacking:
            kind, count = next(iter(lacking.items()))
            raise InvalidOptionError(
                f"accountant: its history lacks {sum(lacking.values())} releases that this engine has made or loaded "
                f"({count} of {kind}, among others): it was emptied, shortened or changed by hand. Put them back; for "
                "a training that shares no record with this one, make a PrivacyEngine of its own."
            )

    @abc.abstractmethod
    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return bounds from both sides on the ε spent so far.

        Args:
            delta: Probability that the ε bound may fail, in (0, 1).

        Returns:
            The bounds; the upper one is the guarantee, the lower one what no accountant can go below.
        """

    @abc.abstractmethod
    def delta_bounds(self, epsilon: float) -> Bounds:
        """Return bounds from both sides on the δ at some ε.

        Args:
            epsilon: ε ≥ 0.

        Returns:
            The bounds.
        """

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on the ε spent so far.

        Args:
            delta: Probability that the ε bound may fail, in (0, 1).

        Returns:
            ε ≥ 0; inf only if steps without noise reveal more than δ.
        """
        return self.epsilon_bounds(delta).upper

    def get_delta(self, epsilon: float) -> float:
        """Return an upper bound on δ at some ε.

        Args:
            epsilon: ε ≥ 0.

        Returns:
            δ in [0, 1].
        """
        return self.delta_bounds(epsilon).upper

    def whole_history(self) -> History:
        """Return the checked history, equal releases as one entry.

        Returns:
            Steps, truncated steps and guarantees with their numbers.

        Raises:
            InvalidOptionError: If an entry is out of range, which somebody has put there by hand, or it lacks what an
                engine has released.
        """
        self.check()
        self.require_whole()
        return totals(self.history, self.others, self.relation)

    def check(self) -> None:
        """Refuse entries that no release has made: `history` and `others` are open to be written to.

        Raises:
            InvalidOptionError: If one is not of the form, or out of range.
        """
        where = type(self).__name__
        checked_relation(self.relation)
        checked_history(self.history, where=where)
        checked_others(self.others, where=where)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one release, in constant time.

        A Gaussian mechanism without sampling, such as a noisy hyper-parameter, is a step with sample rate 1; several
        releases on one batch are one step with their `joint_noise_multiplier`.

        Args:
            noise_multiplier: σ, the standard deviation of the noise over the sensitivity.
            sample_rate: q, the probability with which each record joined the batch.

        Raises:
            InvalidOptionError: If a value is out of range; nothing is recorded then.
        """
        self._add_steps(checked_noise_multiplier(noise_multiplier), checked_sample_rate(sample_rate), 1)

    def record(self, event: SamplingEvent, *, noise_multiplier: float, count: int = 1) -> None:
        """Record releases as a sampler describes them; of kinds of rounds and epochs one for each that was begun.

        Args:
            event: How units were selected.
            noise_multiplier: σ, in units of one record's sensitivity.
            count: How many such events.

        Raises:
            InvalidOptionError: If a value is out of range or the relation is not this accountant's.
        """
        sigma = checked_noise_multiplier(noise_multiplier) / event.records_per_unit
        count = positive_int(count, "count")
        if event.kind == "truncated_poisson":
            if event.relation != self.relation:
                raise InvalidOptionError(
                    f"event with relation={event.relation!r}: this accountant's is {self.relation!r}, and truncated "
                    "batches cost differently under the two. Create the accountant with the event's relation."
                )
            entry = truncated_entry(sigma, event.sample_rate, event.num_units, event.truncation or 0)
            self._add_other("truncated_poisson", entry, count)
        elif event.kind == "allocation" and event.steps_per_event > 1:
            self._add_other("allocation", allocation_entry(sigma, event.steps_per_event), count)
        else:
            self._add_steps(sigma, checked_sample_rate(event.sample_rate), count)

    def record_guarantee(self, *, epsilon: float, delta: float = 0.0) -> None:
        """Record a release of any kind that is known to be (ε, δ)-private under this accountant's relation.

        Args:
            epsilon: ε ≥ 0.
            delta: δ in [0, 1).
        """
        self._add_other("guarantee", guarantee_entry(epsilon, delta), 1)

    def _add_steps(self, sigma: float, rate: float, steps: int) -> None:
        if self.history and self.history[-1][:2] == (sigma, rate):
            steps += self.history.pop()[2]
        self.history.append((sigma, rate, steps))

    def _add_other(self, kind: str, parameters: tuple[float, ...], count: int) -> None:
        if self.others and self.others[-1][:2] == (kind, parameters):
            count += self.others.pop()[2]
        self.others.append((kind, parameters, count))

    def __len__(self) -> int:
        """Return the number of releases recorded."""
        return sum(entry[2] for entry in (*self.history, *self.others))

    def __bool__(self) -> bool:
        """Return True: an accountant without steps is still an accountant."""
        return True

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Return the history as plain Python values.

        Args:
            destination: Mapping to fill; a new dict by default.

        Returns:
            Mapping with the keys `history`, `mechanism`, `relation`, and `others` if there are any.

        Raises:
            InvalidOptionError: If an entry is out of range.
        """
        self.check()
        state = {} if destination is None else destination
        state["history"] = list(self.history)
        state["mechanism"] = self.mechanism()
        state["relation"] = self.relation
        if self.others:
            state["others"] = list(self.others)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history by a saved one; which accountant kept it does not matter, what it says was released does.

        Privacy:
            What an engine has released and the saved history lacks stays counted: going back lowers nothing.

        Args:
            state_dict: What `state_dict` returned, of this or another accountant.

        Raises:
            InvalidOptionError: If it is empty, incomplete, out of range, or of another relation.
        """
        missing = [key for key in ("history", "mechanism") if not state_dict or key not in state_dict]
        if missing:
            raise InvalidOptionError(
                f"accountant state: missing {', '.join(missing)}; pass what state_dict() returned."
            )
        relation = checked_relation(state_dict.get("relation", "zero_out"))
        if relation != self.relation:
            raise InvalidOptionError(
                f"accountant state: saved for relation={relation!r}, this is {self.relation!r}; create the accountant "
                "with the saved one."
            )
        history = checked_history(state_dict["history"], where="accountant state")
        others = checked_others(state_dict.get("others", ()), where="accountant state")
        self.history, self.others = history, others
        for (first, second), count in self.lacking().items():
            if isinstance(first, str):
                self._add_other(first, cast("tuple[float, ...]", second), count)
            else:
                self._add_steps(first, cast("float", second), count)
