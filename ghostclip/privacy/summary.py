"""What is said of a guarantee: its summary in one line, and what else trained the model.

The line has ε, δ, neighbouring data sets, sampling, noise, and what is not covered. Modules remember the accounts whose
releases reached their parameters: a notebook's cell that is run again makes a new engine for a model that another one
has trained, whose ε begins at 0, while the model tells what all of them have released. A copy of a model remembers as
well; a state that is loaded into another model, and a model that was pickled, do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from torch import nn

from ghostclip.accounting import Accountant, Bounds
from ghostclip.accounting.calibration import epsilon_too_large
from ghostclip.privacy.budget import accountant_of, charges_of, released_bounds
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
        loaded = bool(other.runs) and all(self.runs.get(run, 0) >= count for run, count in other.runs.items())
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
