"""Summary of a guarantee in one line: ε, δ, neighbouring data sets, sampling, noise, and what is not covered."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ghostclip.accounting import Bounds, epsilon_too_large
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
    bounds: Bounds,
    delta: float,
    *,
    releases: int,
    level: str,
    sampling: Sampling | None,
    unchecked: Iterable[str] = (),
) -> str:
    """Return one line on what was released, what for, and what is not covered."""
    # unchecked: of each model, the checks that were switched off or could not run; empty texts are left out.
    parts = [f"(ε ≤ {rounded_up(bounds.upper)}, δ = {delta:g}) after {releases} accounted releases"]
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
    parts += [text for text in (too_large, *dict.fromkeys(unchecked)) if text]
    return "; ".join(parts) + "."


def rounded_up(epsilon: float) -> str:
    """Format an upper bound with four decimals, never below it."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "∞"


def rounded_down(epsilon: float) -> str:
    """Format a lower bound with four decimals, never above it."""
    return f"{math.floor(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "∞"
