"""Texts for a person: the mechanism before the run, and the results after it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from ghostclip.finetune.card import NAME as CARD
from ghostclip.finetune.card import loader_of
from ghostclip.finetune.checkpoint import RunState
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.output import PLOT, RECORD
from ghostclip.finetune.privacy import Mechanism
from ghostclip.finetune.record import DataFacts, Outcome
from ghostclip.privacy.summary import rounded_down, rounded_up

_WIDTH = 100
_LABEL = 14


def plan_text(data: DataFacts, model: str, mechanism: Mechanism, *, state: RunState, options: FinetuneOptions) -> str:
    """Say what is about to happen.

    Args:
        data: The samples.
        model: The model in words.
        mechanism: The mechanism.
        state: What happened so far.
        options: The run's options.

    Returns:
        Lines.
    """
    privacy = (
        f"ε ≤ {mechanism.target_epsilon:g} at δ = {mechanism.delta:.3g}"
        f"{'' if options.delta is not None else f' (1/(10 N), N = training {data.unit}s)'}, for one {data.unit}; "
        f"σ = {mechanism.noise_multiplier:.3f}, C = {mechanism.max_grad_norm:g}, q = {mechanism.sample_rate:.4f}"
    )
    epochs = mechanism.steps * mechanism.sample_rate
    steps = f"{mechanism.steps} private steps of {mechanism.batch_size} {data.unit}s on average ({epochs:.3g} epochs)"
    if state.step:
        steps += f", of which {state.step} are done or counted as spent"
    return "\n".join(
        (_item("data", _data_text(data)), _item("model", model), _item("privacy", privacy), _item("training", steps))
    )


def result_text(outcome: Outcome) -> str:
    """Say what came out.

    Args:
        outcome: The run.

    Returns:
        Lines.
    """
    lines = [
        "",
        _quality_line(outcome),
        _item("privacy", _guarantee(outcome)),
        *(_item("", f"- {line}") for line in (*outcome.assumptions, *outcome.unchecked)),
        *(_item("warning", line) for line in outcome.warnings),
        *_cost_lines(outcome),
        *_file_lines(outcome),
    ]
    return "\n".join(lines)


def _quality_line(outcome: Outcome) -> str:
    before, after, data = outcome.before, outcome.after, outcome.data
    held_out = f"on {data.evaluated} held-out {data.unit}s"
    if before.accuracy is None or after.accuracy is None:
        return _item("perplexity", f"{before.perplexity:.2f} → {after.perplexity:.2f} per token {held_out}")
    return _item("accuracy", f"{before.accuracy:.1%} → {after.accuracy:.1%} {held_out}")


def _guarantee(outcome: Outcome) -> str:
    if not outcome.is_private:
        return "NONE: the noise was fixed with --unsafe-noise-seed"
    return (
        f"ε ≤ {rounded_up(outcome.epsilon)} at δ = {outcome.mechanism.delta:.4g} for one {outcome.data.unit}, after "
        f"{outcome.state.step} steps (no accountant could report less than {rounded_down(outcome.epsilon_lower)})"
    )


def _data_text(data: DataFacts) -> str:
    counts = f"{data.training} training and {data.held_out} held-out {data.unit}s"
    if data.unit == "row":
        return (
            f"{data.source}: {counts} of up to {data.passage_length} tokens ({data.tokens}); one row is one sample and "
            "the unit of privacy"
        )
    documents = "1 document" if data.documents == 1 else f"{data.documents} documents"
    return (
        f"{data.source}: {documents} → {counts} of up to {data.passage_length} tokens ({data.tokens}); one passage is "
        f"one sample and the unit of privacy (the longest document makes {data.most_per_document})"
    )


def _cost_lines(outcome: Outcome) -> list[str]:
    return [
        _item("step time", _beside(outcome.private_seconds, outcome.ordinary_seconds, _seconds)),
        _item("step memory", _beside(*_peaks(outcome), _mebibytes) + ", peak above weights and optimizer state"),
        _item(
            "",
            f"for {outcome.mechanism.batch_size} samples, at most {outcome.private.physical_batch} at once, clipped by "
            f"{outcome.strategy} on {_devices(outcome)}; ordinary: {_ordinary_text(outcome)}",
        ),
    ]


def _devices(outcome: Outcome) -> str:
    kind = outcome.device.partition(":")[0]
    return outcome.device if outcome.processes == 1 else f"{kind} in {outcome.processes} processes"


def _ordinary_text(outcome: Outcome) -> str:
    if outcome.ordinary is None:
        return outcome.ordinary_missing
    return (
        f"{len(outcome.ordinary.timed)} non-private steps of a copy with fresh weights, which was thrown away "
        "(medians; on a CPU each beside a private step)"
    )


def _peaks(outcome: Outcome) -> tuple[float | None, float | None]:
    return outcome.private.peak_bytes, None if outcome.ordinary is None else outcome.ordinary.peak_bytes


def _file_lines(outcome: Outcome) -> list[str]:
    folder, options = outcome.output, outcome.options
    what = "" if options.lora is None else "adapters alone; "
    how = f"{what}{loader_of(options)}.from_pretrained loads it, as {CARD} shows"
    return [
        _item("checkpoint", f"{folder} ({how})"),
        _item("keep secret", f"{folder / PLOT}, {folder / RECORD} (exact losses: as private as the data)"),
    ]


def _beside(private: float | None, ordinary: float | None, unit: Callable[[float], str]) -> str:
    if private is None:
        return "not measured (too few steps since the start or --resume)"
    if ordinary is None:
        return f"{unit(private)} private, ordinary not measured"
    return f"{unit(private)} private, {unit(ordinary)} ordinary: {private / ordinary:.2f} ×"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.4g} MiB"


def _item(label: str, text: str) -> str:
    head = f"{label}:" if label else ""
    return textwrap.fill(
        text, _WIDTH, initial_indent=head.ljust(_LABEL), subsequent_indent=" " * _LABEL, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
