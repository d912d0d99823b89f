"""What all accountants share: the interface, which users implement too, the history, and the whole privacy profile.

The privacy-loss-distribution accountant is tight, with a lower bound beside every upper one. A history's composed
privacy loss is made for one direction and one side at a time.
"""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ghostclip._validate import positive_int, probability
from ghostclip.accounting.contour import Composition
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
from ghostclip.accounting.pairs import Cells, DiscretePair, SampledGaussian, allocated, discretised
from ghostclip.accounting.solve import Bounds, epsilon_bounds
from ghostclip.errors import InvalidOptionError


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

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
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

        def hook(optimizer: Any) -> None:
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

    def set_counts(self, released: Counter[Kind]) -> None:
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


MOST_GROUPS = 1000
"""More distinct steps than this are counted as the next noisier (lower) or less noisy (upper) of so many."""

MANY = 32
"""Distinct steps above which cells are wider, and bounds of ε may lie further apart."""

NARROW, WIDE = 0.02, 0.06
"""First width of cells in σ for few, and for many, distinct steps."""

NEAR, FAR, FARTHEST = 1e-4, 8e-4, 4e-3
"""Relative distance in ε that bounds may have, for few, many, and more than `MOST_GROUPS` distinct steps."""

Group = tuple[tuple[float, float], int]


def directions(relation: str) -> tuple[str, ...]:
    """Return the directions of a neighbouring relation; the guarantee is that of the worst."""
    return ("replace",) if relation == "replace_one" else ("remove", "add")


def reach(history: History, delta: float) -> float:
    """Return where tails are cut off, in σ: the loss is below a millionth of δ over all steps."""
    from scipy.special import ndtri

    return math.ceil(2 * max(9.0, -float(ndtri(max(1e-6 * delta / max(1, history.count), 1e-300))))) / 2


def compose(history: History, direction: str, side: str, cells: Cells) -> Composition:
    """Return the total privacy loss in a direction; side "upper" dominates it, "lower" is dominated."""
    pairs: list[DiscretePair] = []
    counts: list[int] = []
    gaussian = 0.0
    for (sigma, rate), count in _few(history.steps, side):
        if rate == 1 and sigma > 0:
            gaussian += count * (_sensitivity(direction) / sigma) ** 2
        else:
            pairs.append(discretised(SampledGaussian(sigma, rate, direction), cells, side))
            counts.append(count)
    for (sigma, rate, records, largest), count in history.truncated:
        step = SampledGaussian(sigma, rate, direction)
        pairs.append(_truncated(step, (int(records), int(largest)), history.relation, cells, side))
        counts.append(count)
    for (sigma, steps), count in history.allocated:
        pairs.append(allocated(sigma, int(steps), direction, cells, side))
        counts.append(count)
    return Composition(pairs, counts, gaussian)


def _sensitivity(direction: str) -> float:
    return 2.0 if direction == "replace" else 1.0


def _few(groups: tuple[Group, ...], side: str) -> list[Group]:
    """Return at most about `MOST_GROUPS` groups: σ and q moved to the ends of intervals of equal ratio."""
    # More noise or a smaller rate is a post-processing of less noise and a larger rate.
    if len(groups) <= MOST_GROUPS:
        return list(groups)
    several_rates = len({rate for (_, rate), _ in groups}) > 32
    for log_ratio in (2.0**power for power in range(-14, 8)):
        merged: dict[tuple[float, float], int] = {}
        for (sigma, rate), count in groups:
            moved = min(1.0, _moved(rate, log_ratio, up=side == "upper")) if several_rates else rate
            key = (_moved(sigma, log_ratio, up=side == "lower"), moved)
            merged[key] = merged.get(key, 0) + count
        if len(merged) <= MOST_GROUPS:
            break
    return sorted(merged.items())


def _moved(value: float, log_ratio: float, *, up: bool) -> float:
    if value in {0.0, 1.0}:
        return value
    exponent = math.log(value) / log_ratio
    moved = math.exp((math.ceil(exponent) if up else math.floor(exponent)) * log_ratio)
    return max(value, moved) if up else min(value, moved)


def truncation_probability(records: int, rate: float, largest: int) -> float:
    """Return an upper bound of P(Binomial(N, q) ≥ largest): the other records fill the batch."""
    from scipy.special import betainc

    if largest > records:
        return 0.0
    return min(1.0, float(betainc(largest, records - largest + 1, rate)) * (1 + 1e-9))


def _truncated(step: SampledGaussian, batch: tuple[int, int], relation: str, cells: Cells, side: str) -> DiscretePair:
    """Return the pair of a step on a Poisson sample of which at most so many are kept.

    Privacy:
        Let the other records' sample A be known. If A leaves room, the step is the untruncated one. Else the record,
        sampled with probability q at most, displaces one of A: then the two sums are, given all coins, s - y + x and
        s - y for "zero_out" (at distance C), s - y + x and s for "add_remove", s - y + x and s - y + x' for
        "replace_one" (at distance 2C). Revealing the coins only adds: with probability P(A full)·q a Gaussian
        mechanism without amplification, with P(A full)·(1 - q) nothing. No factor 1 + e^ε as from total variation.
        The lower bound is that of records that contribute nothing besides one, which is kept with probability
        at least q·P(A leaves room).
    """
    full = truncation_probability(batch[0], step.rate, batch[1])
    if side == "lower":
        rate = max(step.rate * (1 - full), 1e-300)
        return discretised(SampledGaussian(step.sigma, rate, step.direction), cells, side)
    if full == 0:
        return discretised(step, cells, side)
    distance = 1.0 if relation == "zero_out" else 2.0
    revealed = discretised(SampledGaussian(step.sigma / distance, 1.0, "remove"), cells, side)
    nothing = DiscretePair(np.zeros(2), np.full(2, 0.5), 0.0)
    return discretised(step, cells, side).mixed_with(nothing.mixed_with(revealed, step.rate), full)


class PLDAccountant(Accountant):
    """Accountant by the distribution of the privacy loss, in both directions of the neighbouring relation.

    Privacy:
        ε and δ are upper bounds for every history whose parameters do not depend on the private data. Discretisation,
        truncation, smoothing and rounding are bounded and included (see `pairs` and `contour`). The lower bound
        holds for the worst data and gradients, so that no accountant can report less; for ε in [0.1, 50] the two
        usually meet within 0.01 %.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "pld"

    def epsilon_bounds(self, delta: float) -> Bounds:
        return pld_epsilon(self.whole_history(), probability(delta, "delta"))


class PRVAccountant(PLDAccountant):
    """The name under which Opacus users look for a tight accountant; the same as `PLDAccountant`."""

    @classmethod
    def mechanism(cls) -> str:
        return "prv"


@lru_cache(maxsize=256)
def pld_epsilon(history: History, delta: float) -> Bounds:
    """Return bounds on ε at δ."""
    if history.participation <= delta:
        return Bounds(0.0, 0.0)
    many = len(history.steps) + len(history.truncated) + len(history.allocated) > MANY
    return epsilon_bounds(
        partial(compose, history),
        directions(history.relation),
        delta=delta,
        reach=reach(history, delta),
        width=WIDE if many else NARROW,
        tolerance=FARTHEST if len(history.steps) > MOST_GROUPS else FAR if many else NEAR,
    )
