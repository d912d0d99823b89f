"""Account of what an engine has released: accountant, ledger on disk and budgets, kept in step; and its summary.

The line has ε, δ, neighbouring data sets, sampling, noise, and what is not covered. Modules remember the accounts whose
releases reached their parameters: a notebook's cell that is run again makes a new engine for a model that another one
has trained, whose ε begins at 0, while the model tells what all of them have released. A copy of a model remembers as
well; a state that is loaded into another model, and a model that was pickled, do not.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn

from ghostclip import _validate
from ghostclip.accounting import Accountant, Bounds, IAccountant
from ghostclip.accounting.calibration import bounding_accountant, epsilon_too_large, smallest_noise_multiplier
from ghostclip.accounting.history import Charge, Kind, counted, joined
from ghostclip.checks.unchecked import Unchecked
from ghostclip.distributed import SharedNoise
from ghostclip.distributed.agreement import announcing_error, refusals_shared, require_agreement
from ghostclip.distributed.release import fingerprint
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.noise.keys import Owner
from ghostclip.optim import DPOptimizer
from ghostclip.optim.dp_optimizer import SkipStep
from ghostclip.privacy.budget import (
    Budget,
    accountant_of,
    charges_of,
    lacking,
    record_charges,
    refuse_unfit,
    refuse_unsupported,
    released_bounds,
    replace_charges,
    replace_history,
)
from ghostclip.privacy.ledger_file import Entry, LedgerFile, total
from ghostclip.privacy.sampling import Sampling

_RELATIONS = {
    "zero_out": "with one {unit} or with nothing in its place (the number of {unit}s, {count}, is public)",
    "add_remove": "with one {unit} more or less",
}
_SAMPLING = {
    "poisson": "Poisson sampling with q = {rate:.4g}",
    "truncated_poisson": "Poisson sampling with q = {rate:.4g} of at most {truncation} in a batch",
    "full": "full batches",
    "shuffled": "shuffled batches, a pass counted as one full participation",
    "cyclic": "the same batches in each epoch of {steps} steps",
    "cyclic_poisson": "Poisson sampling with q = {rate:.4g} of one group after another, of {steps}",
    "allocation": "each record in exactly {often} of {steps} steps, drawn uniformly and anew for the next ones",
}
_NOISE = {
    "fast": "fast noise (a statistical generator, floating-point numbers)",
    "secure": "secure noise (a cryptographic keystream, floating-point numbers)",
    "exact": "exact noise (discrete, on integers)",
}
_FLOATS = "attacks on the rounding of floating-point numbers or on timing"
# What one record's gradient is, in a batch with others, is up to the kernels.
_INTEGERS = "timing, and what a record changes in the rounding of others' gradients where a batch holds several"


def summary_text(
    bounds: Bounds, delta: float, released: Released, level: str, sampling: Sampling | None, also: Iterable[str]
) -> str:
    """Return one line on what was released, what for, and what is not covered."""
    # also: checks of the models that were switched off or could not run, and what other engines have released; empty
    # texts are left out.
    count = len(released.accountant)
    parts = [f"(ε ≤ {rounded_up(bounds.upper)}, δ = {delta:g}) after {count} accounted releases"]
    if bounds.lower > 0:
        parts.append(f"no accountant could report less than ε = {rounded_down(bounds.lower)}")
    if sampling is not None:
        event = sampling.event
        unit = f"{event.unit} (at most {event.records_per_unit} records in a batch)"
        unit = unit if event.records_per_unit > 1 else event.unit
        relation = _RELATIONS[event.relation].format(unit=event.unit, count=event.num_units)
        parts.append(f"for each {unit}, between data sets {relation}")
        said = _SAMPLING[event.kind].format(
            rate=event.sample_rate,
            truncation=event.truncation,
            steps=event.steps_per_event,
            often="one" if event.participations == 1 else event.participations,
        )
        parts.append(f"{said}, as declared by the user, who answers for it" if sampling.draws is None else said)
        if sampling.correlation is not None:
            lags = sampling.correlation.lags
            over = f"{len(lags)} steps" if lags else f"all steps, by {sampling.correlation.buffers} buffers"
            parts.append(f"noise correlated over {over}, as one Gaussian mechanism on all of them")
        if sampling.draws is not None and sampling.draws.comparison:
            parts.append(sampling.draws.comparison)
    parts.append(_NOISE[level])
    uncovered = _INTEGERS if level == "exact" else _FLOATS
    parts.append(
        f"not covered: losses, norms and batch sizes of the training, choices made by them, {uncovered}, and other "
        "uses of the data"
    )
    too_large = (epsilon_too_large(bounds.upper) or "").removesuffix(".")
    parts += [text for text in (too_large, *dict.fromkeys(also)) if text]
    return "; ".join(parts) + "."


def rounded_up(epsilon: float) -> str:
    """Format an upper bound with four decimals, never below it."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "∞"


def rounded_down(epsilon: float) -> str:
    """Format a lower bound with four decimals, never above it."""
    return f"{math.floor(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "∞"


_KEY: Final = "_ghostclip_released_by"


class Released:
    """Accountant and runs of one account, as models it has released into refer to them."""

    # the account's table itself
    # exchanged with the account's
    def __init__(self, accountant: Accountant, runs: dict[str, int]) -> None:
        self.accountant, self.runs = accountant, runs

    def continues(self, other: Released) -> bool:
        """Return whether this account continues another: it is the same, or was loaded or composed from it."""
        loaded = bool(other.runs) and _includes(self.runs, other.runs)
        return other is self or other.accountant is self.accountant or loaded


class _Marks(list[Released]):
    """The accounts that have released into a module; of a copy the same ones, of a pickle none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Marks:
        return _Marks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Marks, ()


def remember(model: nn.Module, released: Released) -> None:
    """Mark a model's trained modules with the account that releases into them."""
    for module in model.modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            marks = vars(module).setdefault(_KEY, _Marks())
            if all(one is not released for one in marks):
                marks.append(released)


def earlier(model: nn.Module, released: Released) -> list[Released]:
    """Return the other accounts that have released into a model, or a part of it, that this one does not continue."""
    accounts = {id(one): one for module in model.modules() for one in vars(module).get(_KEY, ())}
    return [one for one in accounts.values() if not released.continues(one) and len(one.accountant)]


def warning_of(model: nn.Module, others: Sequence[Released], delta: float) -> str:
    """Return the text of a warning: a model was trained by other engines before."""
    spent = " and ".join(f"ε ≤ {_epsilon(one.accountant, delta)} in {len(one.accountant)} releases" for one in others)
    return (
        f"{type(model).__name__} was trained by another PrivacyEngine before ({spent}, at δ = {delta:g}). This "
        "engine's ε is of its own releases alone; for the same records all of them add up. To go on in one account, "
        "call make_private on the engine that trained the model, or set engine.accountant = earlier_engine.accountant "
        "before make_private. To begin anew, build the model anew."
    )


def texts_of(others: Iterable[Released], current: Released, delta: float) -> Iterator[str]:
    """Yield clauses for a summary on other engines' releases into the same models."""
    for one in others:
        if current.continues(one):
            continue
        joint_text = ""
        if one.accountant.relation == current.accountant.relation:
            joined = accountant_of(current.accountant, [*charges_of(one.accountant), *charges_of(current.accountant)])
            joint_text = f", for the same records ε ≤ {_epsilon(joined, delta)} together"
        yield (
            f"beside it another engine trained this model, with ε ≤ {_epsilon(one.accountant, delta)} in "
            f"{len(one.accountant)} releases{joint_text}"
        )


def _epsilon(accountant: Accountant, delta: float) -> str:
    """Return an account's ε as text."""
    return rounded_up(released_bounds(accountant, delta, coordinates=0).upper)


_log = logging.getLogger(__name__)

_REMEDY = (
    "What either releases would be missing in the other's ε. Make a PrivacyEngine, and call make_private(), in the "
    "process that trains; to continue there, load a checkpoint into it."
)
_HERE = (
    "Ask for ε in this process before it ends, or keep a ledger (PrivacyEngine(ledger=path)), which holds it for all."
)
_REPEATED = (
    "step(): an earlier state of the noise or of the loader was loaded by itself, and the step would repeat noise, or "
    "a draw, of one that was released. Go back with engine.load_checkpoint or optimizer.load_state_dict alone, which "
    "go on with others. To go on here, call make_private again, with the ordinary DataLoader."
)
_BEFORE = "before this ledger"
# What a target may leave unused.
_UNUSED, _UNUSED_SHARE = 0.01, 1e-3


class Account:
    """Charges every step of an engine's optimizers.

    Privacy:
        A step is checked against the budgets before noise is drawn. It is written, to the disk first, after its noise
        is drawn and before anything can see the result: a crash over-counts and never under-counts. A step that a
        resumed run makes again is the same release if noise, number and values are the same; it costs nothing a second
        time. If only the values differ (other code, options, threads or device), one noise would hide two different
        sums, which it cannot: such a step is refused.
    """

    def __init__(self, accountant: Accountant, ledger: LedgerFile | None) -> None:
        """Begin with what the accountant and the ledger hold."""
        self.accountant = accountant
        self.ledger = ledger
        # an accountant of the user's that is told of every release beside `accountant`, or None
        self.own: IAccountant | None = None
        self.budgets: list[Budget] = []
        self.coordinates = 0  # most numbers of one release with discrete noise; 0 while there was none
        self.unchecked: list[Unchecked] = []  # checks of the models that could not run
        self._owner: Owner | None = None  # the object and process that may charge; None before the first optimizer
        self.charged = False  # whether this process has charged a release
        # by run (see `run_of`), the number up to which the account has its releases: it tells which of two accounts,
        # saved or in memory, continues the other; a release that is made again has the number that it had
        self.runs: dict[str, int] = {}
        self._unkeyed: dict[int, str] = {}  # runs of noise sources without a key, by `id`
        self._released = Counter[Kind]()  # number of charges of each kind
        accountant.set_counts(self._released)
        if ledger is not None and ledger.entries:
            self._begin_with(ledger)
        self._from_before = len(accountant)
        self.released = Released(accountant, self.runs)
        self._made_in = os.getpid()

    def _begin_with(self, ledger: LedgerFile) -> None:
        """Charge the releases that a ledger holds."""
        relations = [str(m["relation"]) for m in ledger.mechanisms if "relation" in m]
        self.accountant.relation = relations[-1] if relations else self.accountant.relation
        self._set_charges(total(ledger.entries))
        self.discrete(max((int(m.get("coordinates", 0)) for m in ledger.mechanisms), default=0))
        for entry in ledger.entries:
            self._record_run(entry.run, entry.number + 1)

    def share_ledger(self, *, shared: bool) -> None:
        """Take the ledger for this process alone or for all ranks, which then adopt what rank 0 has read."""
        # `shared`: ranks share batches; then this is called on all of them.
        if not shared:
            if self.ledger is not None:
                self.ledger.require_alone()
            return
        require_agreement("accountant", [type(one).__qualname__ for one in (self.accountant, self.own)])
        require_agreement("ledger", None if self.ledger is None else self.ledger.given)
        if self.ledger is not None and self.ledger.share(fresh=self.fresh):
            self.runs.clear()
            self.coordinates = 0
            self._begin_with(self.ledger)
            self._from_before = len(self.accountant)

    @property
    def fresh(self) -> bool:
        """Whether this process has charged nothing yet."""
        return len(self.accountant) == self._from_before

    def account_with(self, accountant: IAccountant) -> None:
        """Replace the accountant by the user's own, or keep theirs beside it if it cannot bound any history.

        Privacy:
            Nothing that was released is forgotten: what the account holds is carried over, what the accountant holds
            counts too. What one with four methods says is the user's claim; `engine.epsilon_bounds` is proved.
        """
        # One that bounds any history replaces the account's. One that only has Opacus's four methods is told of every
        # release beside the engine's own, which stays what budgets and checkpoints go by.
        if isinstance(accountant, Accountant):
            self._account_with(accountant)
            self.own = None
            return
        refuse_unfit(accountant)
        charges = charges_of(self.accountant)
        refuse_unsupported(accountant, charges)
        record_charges(accountant, charges)
        self.own = accountant

    def _account_with(self, accountant: Accountant) -> None:
        """Replace the account's accountant by one that bounds histories."""
        before = self.accountant
        if accountant is before:
            return
        bounding_accountant(accountant.mechanism())
        charges, brought, was_fresh = charges_of(before), charges_of(accountant), self.fresh
        if brought and self.ledger is not None:
            raise InvalidOptionError(
                f"accountant with {len(accountant)} steps: the engine's ledger does not hold them. Set one without "
                "steps."
            )
        if accountant.relation != before.relation:
            if charges and brought:
                raise InvalidOptionError(
                    f"accountant with relation={accountant.relation!r}: the account holds steps under "
                    f"{before.relation!r}, and the two do not add up."
                )
            if brought:
                self.require_relation(accountant.relation)
            accountant.relation = before.relation
        replace_charges(accountant, [*brought, *charges])
        before.set_counts(Counter())
        self.accountant = self.released.accountant = accountant
        accountant.set_counts(self._released)
        self._from_before = len(accountant) if was_fresh else -1
        for budget in self.budgets:
            budget.forget()

    def open(self, optimizer: DPOptimizer, sampling: Sampling, mechanism: Mapping[str, Any]) -> None:
        """Charge the steps of an optimizer from now on; ``mechanism`` describes one of its steps in plain values."""
        if self.ledger is not None:
            self.ledger.lock()
        shared = self.ledger is not None and self.ledger.shared
        segment: list[Mapping[str, Any]] = [mechanism]
        untold = [optimizer.clipper.model]
        self._claim()
        self._warn_of_other_processes(optimizer.clipper.model)
        self.unchecked.append(optimizer.clipper.unchecked)
        self.discrete(int(mechanism.get("coordinates", 0)))

        def charge(current: DPOptimizer, released: Sequence[torch.Tensor]) -> None:
            if untold:
                remember(untold.pop(), self.released)
            with announcing_error("release") if shared else nullcontext():
                if self.ledger is not None and segment:
                    self.ledger.begin_segment(segment[0])
                    segment.clear()
                self._charge(current, sampling, released)

        ledger = self.ledger
        if ledger is not None:
            optimizer.compiled.write = lambda compiled: ledger.record_compiled(self._run_of(optimizer), compiled)
            # Asked for every batch: without such a line there is no need to know whose noise it is.
            optimizer.compiled.written = lambda: ledger.compiled and ledger.compiled.get(self._run_of(optimizer))
            optimizer.compiled.repeats = lambda: self._made_before(optimizer) is not None
        optimizer.attach_step_hook(lambda current: self._require(current, sampling))
        optimizer.attach_release_hook(charge)

    def _warn_of_other_processes(self, model: nn.Module) -> None:
        """Warn that another process will have trained weights, and an account without the training."""
        if os.getpid() != self._made_in:
            _log.warning(
                "this PrivacyEngine was made in process %d and trains in process %d: ε is known here alone, and the "
                "engine over there goes on to report what it held. %s",
                self._made_in, os.getpid(), _HERE,
            )  # fmt: skip
        if any(p.requires_grad and p.device.type == "cpu" and p.is_shared() for p in model.parameters()):
            _log.warning(
                "%s has parameters in memory that processes share (share_memory_(), torch.multiprocessing): others see "
                "what is learned, and nothing of the account. %s",
                type(model).__name__, _HERE,
            )  # fmt: skip

    def _claim(self) -> None:
        """Bind the account to this object and process; a copy or a fork of one in use would not know the rest."""
        if self._owner is None:
            self._owner = Owner(self)
        self._owner.require(self, remedy=_REMEDY)

    def discrete(self, coordinates: int) -> None:
        """Charge all releases as ones with discrete noise of so many coordinates, which costs a little of δ."""
        self.coordinates = max(self.coordinates, coordinates)
        for budget in self.budgets:
            budget.coordinates = self.coordinates

    def add_budget(self, budget: Budget) -> None:
        """Enforce a budget from now on."""
        budget.coordinates = self.coordinates
        self.budgets.append(budget)

    def require_relation(self, relation: str) -> None:
        """Set the neighbouring relation of batches that are about to be charged; an account has one."""
        if self._owner is not None:
            self._claim()
        if relation == self.accountant.relation:
            return
        if self._owner is not None or len(self.accountant) > 0:
            raise InvalidOptionError(
                f"data_loader with relation={relation!r}: this engine accounts for {self.accountant.relation!r}, and "
                "the two do not add up. Use a PrivacyEngine (and a ledger) of its own."
            )
        self.accountant.relation = relation

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return bounds on the ε of all releases so far at δ, discrete noise included."""
        if self.ledger is not None:
            self.ledger.require_readable()
        bounds = released_bounds(self.accountant, delta, coordinates=self.coordinates)
        if math.isinf(bounds.upper) and math.isfinite(self.accountant.get_epsilon(delta)):
            raise InvalidOptionError(
                f"delta={delta:g}: noise on {self.coordinates} numbers of an integer grid costs more than that beside "
                "ε. Use a larger delta, more noise, or accept the floating-point effects of noise_level='secure'."
            )
        return bounds

    def noise_for(self, budget: Budget, sampling: Sampling, *, epochs: int, coordinates: int) -> float:
        """Return the σ that meets a budget over some epochs from here on; record in the budget what fits."""
        epochs = _validate.positive_int(epochs, "epochs")
        coordinates = max(coordinates, self.coordinates)

        def epsilon_of(sigma: float) -> float:
            planned = accountant_of(self.accountant, sampling.planned(sigma, epochs=epochs))
            with warnings.catch_warnings():
                # The search tries σ that nobody would use, where numbers overflow on the way to inf.
                warnings.simplefilter("ignore", RuntimeWarning)
                return released_bounds(planned, budget.delta, coordinates=coordinates).upper

        unused = min(_UNUSED, _UNUSED_SHARE * budget.epsilon)
        noise_multiplier = smallest_noise_multiplier(epsilon_of, target=budget.epsilon, tolerance=unused)
        charges = sampling.planned(noise_multiplier, epochs=epochs)
        if len(charges) == 1:
            budget.known_to_fit(charges[0])
        if not self.fresh:
            budget.exclude(charges_of(self.accountant))
            warnings.warn(
                f"{len(self.accountant)} steps are accounted for already. The noise is chosen for target_epsilon="
                f"{budget.epsilon:g} from here on, so that ε over all steps will be larger.",
                stacklevel=3,
            )
        return noise_multiplier

    @property
    def spent(self) -> bool:
        """Whether a step was refused because a budget that stops training was spent."""
        return any(budget.spent and budget.when_spent == "stop" for budget in self.budgets)

    def goes_back(self, runs: Mapping[str, int]) -> bool:
        """Return whether a saved state is behind what this process released, and no ledger covers the difference."""
        return self.goes_on and runs != self.runs

    @property
    def goes_on(self) -> bool:
        """Whether noise and batches continue from where they are whatever is loaded: releases were made, no ledger.

        Privacy:
            This process has released with them, and without a ledger a step that is made again cannot be told from
            another one with the same noise.
        """
        return self.charged and self.ledger is None

    def load(
        self, state: Mapping[str, Any], position: Mapping[str, Any] | None, *, coordinates: int, runs: Mapping[str, int]
    ) -> None:
        """Continue a saved account; releases of this process or the ledger beyond it stay charged."""
        # `position`: position of the ledger when it was saved; None if there was no ledger.
        relation = self.accountant.relation
        if self._owner is None and len(self.accountant) == 0:
            relation = state.get("relation", relation)
        saved = _charges_in(state, relation)
        before: Entry | None = None
        if self.ledger is None:
            if position is not None:
                raise ResumeError(
                    "checkpoint: it was saved with a ledger, which may hold later releases. Give the engine the same "
                    "ledger=path."
                )
            charges = self._joined_with(saved, runs)
        else:
            charges, before = self._joined_with_ledger(self.ledger, saved, position, runs)
        self.accountant.relation = relation
        self.discrete(coordinates)
        for budget in self.budgets:
            budget.forget()
        self._set_charges(joined(charges))
        for run, number in runs.items():
            self._record_run(run, number)
        replace_history(self.own, self.accountant)
        if self.ledger is not None and before is not None:
            if self.coordinates:
                self.ledger.begin_segment({"coordinates": self.coordinates, "relation": relation})
            self.ledger.append(before)

    def _joined_with(self, saved: Sequence[Charge], runs: Mapping[str, int]) -> list[Charge]:
        """Return the union of a saved account and the one in memory, of which one continues the other."""
        charges = charges_of(self.accountant)
        if _includes(self.runs, runs):
            return [*charges, *lacking(saved, charges)]
        if _includes(runs, self.runs):
            return [*saved, *lacking(charges, saved)]
        raise ResumeError(
            f"state of another training: this engine has accounted for {len(self.accountant)} releases that it does "
            "not hold. Load it before the first step, into a PrivacyEngine of its own."
        )

    def _joined_with_ledger(
        self, ledger: LedgerFile, saved: Sequence[Charge], position: Mapping[str, Any] | None, runs: Mapping[str, int]
    ) -> tuple[list[Charge], Entry | None]:
        """Return the ledger's account with what was saved or counted beside it, and a release to write for that."""
        charges, written = charges_of(self.accountant), total(ledger.entries)
        if position is not None:
            ledger.require(position)
            beside = lacking(saved, total(ledger.releases_at(position)))
            return [*written, *beside, *lacking(lacking(charges, written), beside)], None
        beside = lacking(charges, written)
        digest = hashlib.sha256(repr((saved, sorted(runs.items()))).encode()).hexdigest()[:32]
        taken_over = any(entry.run == _BEFORE and entry.fingerprint == digest for entry in ledger.entries)
        if taken_over or not saved:
            return [*written, *beside], None
        return [*written, *saved, *beside], Entry(_BEFORE, len(ledger.entries), tuple(saved), digest)

    def _record_run(self, run: str, number: int) -> None:
        """Record that the account has the releases of a run up to a number."""
        self.runs[run] = max(number, self.runs.get(run, 0))

    def _set_charges(self, charges: Sequence[Charge]) -> None:
        """Set the account to these charges."""
        replace_charges(self.accountant, charges)
        self._released.clear()
        self._released.update(counted(charges))

    def ledger_position(self) -> dict[str, Any] | None:
        """Return the position of the ledger, or None without one."""
        return None if self.ledger is None else self.ledger.position()

    def _require(self, optimizer: DPOptimizer, sampling: Sampling) -> None:
        """Refuse a step beyond a budget, or skip it where the budget stops training quietly."""
        self._claim()
        if self._made_before(optimizer) is not None:
            return
        draws = sampling.draws
        again = draws is not None and draws.set_back_from >= 0 and draws.repeats
        noise = optimizer.noise_source
        if again or (getattr(noise, "drawn", None) and getattr(noise, "repeats", False)):
            raise ResumeError(_REPEATED)
        self.accountant.require_whole()
        events = sampling.events(optimizer)
        refuse_unsupported(self.own, events)
        for budget in self.budgets:
            if budget.when_spent == "raise":
                budget.require(self.accountant, events, held=self._described())
            elif budget.spent or not budget.fits(self.accountant, events):
                budget.spent = True
                raise SkipStep

    def _described(self) -> str:
        """Say where the steps of an account are written, and of which runs they are."""
        if self.ledger is None:
            return ""
        steps = Counter(entry.run for entry in self.ledger.entries)
        runs = ", ".join(f"{count} of run {run[:8]}" for run, count in steps.items())
        return f" (ledger {self.ledger.path}: {runs})"

    def _charge(self, optimizer: DPOptimizer, sampling: Sampling, released: Sequence[torch.Tensor]) -> None:
        """Charge a step whose release is formed but not visible yet, and write it into the ledger."""
        events = sampling.events(optimizer)
        self.charged = True
        run = self._run_of(optimizer)
        if self.ledger is not None:
            made, noise = self._made_before(optimizer), optimizer.noise_source
            digest = fingerprint(released, in_parts=isinstance(noise, SharedNoise) and noise.in_parts)
            if made is not None:
                with refusals_shared("step made before") if self.ledger.shared else nullcontext():
                    self._refuse_other_values(optimizer, made, digest)
                sampling.record_step(events)
                return
            self.ledger.append(Entry(run, optimizer.releases, tuple(events), digest))
        self._record_run(run, optimizer.releases + 1)
        self._add(events)
        sampling.record_step(events)

    def _add(self, events: Sequence[Charge]) -> None:
        """Charge costs to the accountants and budgets."""
        for event in events:
            if isinstance(event[0], str):
                self.accountant.add(event)
            else:
                record_charges(self.accountant, [event])
        self._released.update(counted(events))
        record_charges(self.own, events)
        for budget in self.budgets:
            budget.charge(self.accountant, events)

    def _made_before(self, optimizer: DPOptimizer) -> str | None:
        """Return the fingerprint that the next step had when it was made before, or None."""
        return None if self.ledger is None else self.ledger.find(self._run_of(optimizer), optimizer.releases)

    def _refuse_other_values(self, optimizer: DPOptimizer, before: str, digest: str) -> None:
        """Refuse a step made again with another sum: two sums under one noise show their difference."""
        if before == digest:
            return
        raise ResumeError(
            f"step {optimizer.releases + 1} was made before the interruption with other values: this run does not "
            "repeat the interrupted one bit for bit (other code, options, threads or device), and the same noise must "
            "not hide two different sums. Resume with load_checkpoint(..., fresh_randomness=True); the steps that "
            "were lost stay counted."
        )

    def _run_of(self, optimizer: DPOptimizer) -> str:
        """Return the run that a release belongs to: a digest of the optimizer's noise key."""
        # A source of the user's own need not have one.
        return run_of(optimizer.noise_source.state_dict()) or self._unkeyed.setdefault(
            id(optimizer.noise_source), secrets.token_hex(8)
        )


def _charges_in(state: Mapping[str, Any], relation: str) -> list[Charge]:
    """Return the charges of a saved accountant, which must have the relation."""
    keeper = bounding_accountant(relation=relation)
    keeper.load_state_dict(state)
    return charges_of(keeper)


def _includes(runs: Mapping[str, int], others: Mapping[str, int]) -> bool:
    """Return whether an account has every release that another has, by their `runs`."""
    return all(runs.get(run, 0) >= number for run, number in others.items())


def run_of(noise_state: Mapping[str, Any]) -> str | None:
    """Return a digest of the key in a noise source's state, 16 hexadecimal digits, or None if it has no key."""
    key = noise_state.get("key")
    return None if key is None else hashlib.sha256(f"ghostclip run {key}".encode()).hexdigest()[:16]
