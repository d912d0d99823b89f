"""Texts for a person: the mechanism before the run, and the results after it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ghostclip.finetune.output import CARD, PLOT, RECORD
from ghostclip.finetune.record import loader_of
from ghostclip.privacy.summary import rounded_down, rounded_up

if TYPE_CHECKING:
    from ghostclip.finetune.run import FinetuneRun

_WIDTH, _LABEL = 100, 14


def plan_text(run: FinetuneRun) -> str:
    """Say what is about to happen."""
    data, mechanism, unit = run.data, run.mechanism, run.options.unit
    given = "" if run.options.delta is not None else f" (1/(10 N), N = training {unit}s)"
    epochs = mechanism.steps * mechanism.sample_rate
    done = f", of which {run.state.step} are done or counted as spent" if run.state.step else ""
    documents = "1 document" if data["documents"] == 1 else f"{data['documents']} documents"
    cut, unit_is = "", "one row is one sample and the unit of privacy"
    if unit == "passage":
        cut = f"{documents} → "
        unit_is = (
            "one passage is one sample and the unit of privacy (the longest document makes "
            f"{data['most_per_document']})"
        )
    return _page(
        ("data", f"{data['source']}: {cut}{data['training']} training and {data['held_out']} held-out {unit}s of up to "
         f"{data['passage_length']} tokens ({data['tokens']}); {unit_is}"),
        ("model", run.model_text),
        ("privacy", f"ε ≤ {mechanism.target_epsilon:g} at δ = {mechanism.delta:.3g}{given}, for one {unit}; "
         f"σ = {mechanism.noise_multiplier:.3f}, C = {mechanism.max_grad_norm:g}, q = {mechanism.sample_rate:.4f}"),
        ("training", f"{mechanism.steps} private steps of {mechanism.batch_size} {unit}s on average "
         f"({epochs:.3g} epochs){done}"),
    )  # fmt: skip


def result_text(run: FinetuneRun, record: dict[str, Any], unchecked: str | None) -> str:
    """Say what came out."""
    privacy, folder = record["privacy"], run.output
    adapters = "" if run.options.lora is None else "adapters alone; "
    held_out = f"on {run.data['evaluated']} held-out {run.options.unit}s"
    if "held_out_perplexity" in record:
        found = record["held_out_perplexity"]
        quality = ("perplexity", f"{found['before']:.2f} → {found['after']:.2f} per token {held_out}")
    else:
        found = record["held_out_accuracy"]
        quality = ("accuracy", f"{found['before']:.1%} → {found['after']:.1%} {held_out}")
    guarantee = "NONE: the noise was fixed with --unsafe-noise-seed"
    if privacy["private"]:
        guarantee = (
            f"ε ≤ {rounded_up(privacy['epsilon'])} at δ = {privacy['delta']:.4g} for one {run.options.unit}, after "
            f"{run.state.step} steps (no accountant could report less than "
            f"{rounded_down(privacy['epsilon_lower_bound'])})"
        )
    return "\n" + _page(
        quality,
        *((("weights", f"{run.averaged}, which is evaluated and written"),) if run.averaged else ()),
        ("privacy", guarantee),
        *(("", f"- {line}") for line in (*privacy["assumptions"], unchecked) if line),
        *(("warning", line) for line in privacy["warnings"]),
        *_costs(run, record),
        ("checkpoint", f"{folder} ({adapters}{loader_of(run.options)}.from_pretrained loads it, as {CARD} shows)"),
        ("keep secret", f"{folder / PLOT}, {folder / RECORD} (exact losses: as private as the data)"),
    )


def _costs(run: FinetuneRun, record: dict[str, Any]) -> list[tuple[str, str]]:
    private, ordinary = record["cost"]["private"], record["cost"]["ordinary"]
    count, kind = run.ranks.count, run.device.type
    where = str(run.device) if count == 1 else f"{kind} in {count} processes"
    beside = ""
    if run.options.comparison_steps:
        beside = "; ordinary: " + (
            record["cost"]["ordinary_missing"]
            or f"{ordinary['timed_steps']} non-private steps of a copy with fresh weights afterwards (medians)"
        )

    def both(name: str, unit: Callable[[float], str]) -> str:
        if private[name] is None:
            return "not measured (too few steps since the start or --resume)"
        if not run.options.comparison_steps:
            return unit(private[name])
        if ordinary is None or ordinary[name] is None:
            return f"{unit(private[name])} private, ordinary not measured"
        ratio = private[name] / ordinary[name]
        return f"{unit(private[name])} private, {unit(ordinary[name])} ordinary: {ratio:.2f} ×"

    peak = both("peak_bytes_above_weights_and_optimizer", lambda value: f"{value / 2**20:.4g} MiB")
    return [
        ("step time", both("seconds_per_step", lambda s: f"{s:.3g} s" if s >= 1.0 else f"{1e3 * s:.3g} ms")),
        ("step memory", f"{peak}, peak above weights and optimizer state"),
        ("", f"for {run.mechanism.batch_size} samples, at most {private['physical_batch']} at once, clipped by "
         f"{record['strategy']} on {where}{beside}"),
    ]  # fmt: skip


def _page(*items: tuple[str, str]) -> str:
    return "\n".join(
        textwrap.fill(
            text, _WIDTH, initial_indent=(f"{label}:" if label else "").ljust(_LABEL), subsequent_indent=" " * _LABEL,
            break_long_words=False, break_on_hyphens=False,
        )
        for label, text in items
    )  # fmt: skip
