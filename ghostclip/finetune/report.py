"""Texts for a person: the mechanism before the run, and the results after it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ghostclip.finetune.output import CARD, PLOT, RECORD
from ghostclip.finetune.record import loader_of
from ghostclip.privacy.summary import rounded_down, rounded_up

if TYPE_CHECKING:
    from ghostclip.finetune.state import FinetuneRun

_WIDTH, _LABEL = 100, 14


def plan_text(run: FinetuneRun) -> str:
    """Say what is about to happen."""
    data, mechanism, unit = run.data, run.mechanism, run.options.unit
    privacy = (
        f"ε ≤ {mechanism.target_epsilon:g} at δ = {mechanism.delta:.3g}"
        f"{'' if run.options.delta is not None else f' (1/(10 N), N = training {unit}s)'}, for one {unit}; "
        f"σ = {mechanism.noise_multiplier:.3f}, C = {mechanism.max_grad_norm:g}, q = {mechanism.sample_rate:.4f}"
    )
    epochs = mechanism.steps * mechanism.sample_rate
    steps = f"{mechanism.steps} private steps of {mechanism.batch_size} {unit}s on average ({epochs:.3g} epochs)"
    if run.state.step:
        steps += f", of which {run.state.step} are done or counted as spent"
    samples = (
        f"{data['training']} training and {data['held_out']} held-out {unit}s of up to {data['passage_length']} tokens"
    )
    documents = "1 document" if data["documents"] == 1 else f"{data['documents']} documents"
    source = f"{data['source']}: {samples} ({data['tokens']}); one row is one sample and the unit of privacy"
    if unit == "passage":
        source = (
            f"{data['source']}: {documents} → {samples} ({data['tokens']}); one passage is one sample and the unit of "
            f"privacy (the longest document makes {data['most_per_document']})"
        )
    return "\n".join(
        (_item("data", source), _item("model", run.model_text), _item("privacy", privacy), _item("training", steps))
    )


def result_text(run: FinetuneRun, record: dict[str, Any], unchecked: Sequence[str]) -> str:
    """Say what came out."""
    privacy, folder = record["privacy"], run.output
    what = "" if run.options.lora is None else "adapters alone; "
    return "\n".join(
        (
            "",
            _quality(run, record),
            _item("privacy", _guarantee(run, privacy)),
            *(_item("", f"- {line}") for line in (*privacy["assumptions"], *unchecked)),
            *(_item("warning", line) for line in privacy["warnings"]),
            *_costs(run, record),
            _item("checkpoint", f"{folder} ({what}{loader_of(run.options)}.from_pretrained loads it, as {CARD} shows)"),
            _item("keep secret", f"{folder / PLOT}, {folder / RECORD} (exact losses: as private as the data)"),
        )
    )


def _quality(run: FinetuneRun, record: dict[str, Any]) -> str:
    held_out = f"on {run.data['evaluated']} held-out {run.options.unit}s"
    if "held_out_perplexity" in record:
        found = record["held_out_perplexity"]
        return _item("perplexity", f"{found['before']:.2f} → {found['after']:.2f} per token {held_out}")
    found = record["held_out_accuracy"]
    return _item("accuracy", f"{found['before']:.1%} → {found['after']:.1%} {held_out}")


def _guarantee(run: FinetuneRun, privacy: dict[str, Any]) -> str:
    if not privacy["private"]:
        return "NONE: the noise was fixed with --unsafe-noise-seed"
    return (
        f"ε ≤ {rounded_up(privacy['epsilon'])} at δ = {privacy['delta']:.4g} for one {run.options.unit}, after "
        f"{run.state.step} steps (no accountant could report less than {rounded_down(privacy['epsilon_lower_bound'])})"
    )


def _costs(run: FinetuneRun, record: dict[str, Any]) -> list[str]:
    private, ordinary = record["cost"]["private"], record["cost"]["ordinary"]
    count, kind = run.ranks.count, run.device.type
    where = str(run.device) if count == 1 else f"{kind} in {count} processes"
    beside = record["cost"]["ordinary_missing"]
    if ordinary is not None:
        beside = (
            f"{ordinary['timed_steps']} non-private steps of a copy with fresh weights, which was thrown away "
            "(medians; on a CPU each beside a private step)"
        )

    def both(name: str, unit: Callable[[float], str]) -> str:
        return _beside(private[name], None if ordinary is None else ordinary[name], unit)

    peak = both("peak_bytes_above_weights_and_optimizer", lambda value: f"{value / 2**20:.4g} MiB")
    return [
        _item("step time", both("seconds_per_step", lambda s: f"{s:.3g} s" if s >= 1.0 else f"{1e3 * s:.3g} ms")),
        _item("step memory", peak + ", peak above weights and optimizer state"),
        _item(
            "",
            f"for {run.mechanism.batch_size} samples, at most {private['physical_batch']} at once, clipped by "
            f"{record['strategy']} on {where}; ordinary: {beside}",
        ),
    ]


def _beside(private: float | None, ordinary: float | None, unit: Callable[[float], str]) -> str:
    if private is None:
        return "not measured (too few steps since the start or --resume)"
    if ordinary is None:
        return f"{unit(private)} private, ordinary not measured"
    return f"{unit(private)} private, {unit(ordinary)} ordinary: {private / ordinary:.2f} ×"


def _item(label: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=(f"{label}:" if label else "").ljust(_LABEL), subsequent_indent=" " * _LABEL,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
