"""What a run leaves beside its model: the JSON record, the picture, and the model card.

Privacy:
    Record and picture hold the exact training losses and batch sizes: they are for whoever may see the data. The card
    says what the mechanism was and what ε is; nothing that was computed from the data without noise.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ghostclip
from ghostclip._files import BLACK, BLUE, ORANGE, PALE, atomic_path, write_text
from ghostclip.finetune.measure import OrdinarySteps, Quality, StepMeasures
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.output import CARD, PLOT, RECORD
from ghostclip.finetune.privacy import ACCOUNTANT, assumptions
from ghostclip.finetune.progress import smoothed
from ghostclip.finetune.samples import labels_of
from ghostclip.privacy.summary import rounded_up

if TYPE_CHECKING:
    from ghostclip.finetune.state import FinetuneRun
    from ghostclip.finetune.training import FinetuneTrainer

SCHEMA = 1
_CARD = """---
library_name: {library}
{base}tags:
- differential-privacy
- dp-sgd
---

# {title}

{guarantee}

{mechanism}

{assumptions}

## Load it

```python
from {library} import {kind}
from transformers import AutoTokenizer

folder = "."  # this folder
model = {kind}.from_pretrained(folder{given})
tokenizer = AutoTokenizer.from_pretrained(folder)
```

Written by ghostclip {version}. What must not be shared lies in the folder `private`, or was never written.
"""


def record_of(run: FinetuneRun, trainer: FinetuneTrainer, ordinary: OrdinarySteps, after: Quality) -> dict[str, Any]:
    """Return what was asked, what was done, what it cost, and what the numbers hold under, as plain values."""
    options, mechanism, state = run.options, run.mechanism, run.state
    # The engine's own account, not the plan: it counted what was released.
    bounds, summary = trainer.guarantee()
    versions = {"ghostclip": ghostclip.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "schema": SCHEMA,
        "versions": versions,
        "machine": {**machine(str(run.device)), "processes": run.ranks.count},
        "options": options.recorded(),
        "seed": state.seed,
        "sessions": state.sessions,
        "data": run.data,
        "model": run.model_text,
        "strategy": trainer.strategy,
        "privacy": {
            "private": options.unsafe_noise_seed is None,
            "epsilon": bounds.upper,
            "epsilon_lower_bound": bounds.lower,
            "summary": summary,
            "accountant": ACCOUNTANT,
            "unit": options.unit,
            "steps_spent": state.step,
            **asdict(mechanism),
            "assumptions": assumptions(mechanism, run.split.most_per_document, options),
            "warnings": list(run.warnings),
        },
        **_qualities(Quality(**state.before), after),  # type: ignore[arg-type]
        "cost": {
            "private": _cost(ordinary.compared(trainer.measures), mechanism.batch_size),
            "ordinary": None if ordinary.measures is None else _cost(ordinary.measures, mechanism.batch_size),
            "all_private": _cost(trainer.measures, mechanism.batch_size),
            "ordinary_missing": ordinary.missing or None,
        },
        "not_private": {"losses": state.losses, "samples": state.samples},
    }


def _qualities(before: Quality, after: Quality) -> dict[str, object]:
    if after.accuracy is None:
        return {"held_out_perplexity": {"before": before.perplexity, "after": after.perplexity}}
    return {
        "held_out_loss": {"before": before.loss, "after": after.loss},
        "held_out_accuracy": {"before": before.accuracy, "after": after.accuracy},
    }


def _cost(measures: StepMeasures, batch_size: int) -> dict[str, object]:
    return {
        "seconds_per_step": measures.seconds(batch_size),
        "timed_steps": len(measures.timed),
        "peak_bytes_above_weights_and_optimizer": measures.peak_bytes,
        "physical_batch": measures.physical_batch,
    }


def machine(device: str) -> dict[str, object]:
    """Return what a run computed on, by the device's name for torch."""
    facts: dict[str, object] = {
        "device": device,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return facts


def write_all(run: FinetuneRun, record: dict[str, Any], after: Quality) -> None:
    """Write picture, record and card, each atomically."""
    mechanism = run.mechanism
    draw(
        run.output / PLOT, losses=run.state.losses, epsilons=mechanism.curve(run.state.step),
        held_out=(run.state.before["loss"], after.loss),
        budget=(mechanism.target_epsilon, mechanism.delta),
        unit="nats per row" if run.options.task == "classify" else "nats per token",
    )  # fmt: skip
    text = json.dumps(_finite(record), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(run.output / RECORD, text + "\n")
    write_text(run.output / CARD, card(run, record))


def _finite(value: Any) -> Any:
    """Return plain values with None in the place of numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def loader_of(options: FinetuneOptions) -> str:
    """Return the class that loads the checkpoint, with its library's name."""
    kind = "SequenceClassification" if options.task == "classify" else "CausalLM"
    return f"transformers.AutoModelFor{kind}" if options.lora is None else f"peft.AutoPeftModelFor{kind}"


def card(run: FinetuneRun, record: dict[str, Any]) -> str:
    """Return the model card, in Markdown as Hugging Face has it."""
    options, mechanism, privacy = run.options, run.mechanism, record["privacy"]
    library, _, kind = loader_of(options).partition(".")
    given = ""
    if options.lora is not None and options.task == "classify":
        # Adapters lie on a model that knows neither labels nor padding.
        labels = labels_of(options)
        given = f", num_labels={len(labels)}, id2label={dict(enumerate(labels))}, pad_token_id={run.tokens.pad_id}"
    bound = f"ε ≤ {rounded_up(privacy['epsilon'])} at δ = {mechanism.delta:.4g} for one {options.unit}"
    # A path of the machine that trained is nobody's business.
    named = options.model is not None and not Path(options.model).exists()
    return _CARD.format(
        library=library, kind=kind, given=given, base=f"base_model: {options.model}\n" if named else "",
        title=run.model_text.partition(", weights from")[0], version=ghostclip.__version__,
        guarantee=f"**{bound}.** {privacy['summary']}"
        if privacy["private"]
        else "**Not private:** the noise was fixed with --unsafe-noise-seed.",
        mechanism=f"DP-SGD: {run.state.step} steps, σ = {mechanism.noise_multiplier:.4g}, "
        f"C = {mechanism.max_grad_norm:g}, Poisson sampling with q = {mechanism.sample_rate:.4g}.",
        assumptions="\n".join(f"- {line}" for line in privacy["assumptions"]),
    )  # fmt: skip


def draw(
    path: Path, *, losses: Sequence[float | None], epsilons: Sequence[tuple[int, float]], held_out: Any,
    budget: tuple[float, float], unit: str = "nats per token",
) -> None:  # fmt: skip
    """Draw loss above and ε below, over the private steps, as PNG; the budget is ε and δ."""
    # The object interface: pyplot would choose a window system and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    shown = [(step, loss) for step, loss in enumerate(losses, start=1) if loss is not None]
    steps, values = [step for step, _ in shown], [loss for _, loss in shown]
    last = max(1, len(losses))
    upper.plot(steps, values, color=PALE, linewidth=1.0, label="training, each step (not private)")
    upper.plot(steps, smoothed(values), color=BLUE, linewidth=2.0, label="training, smoothed")
    diamonds = {"color": BLACK, "markersize": 7, "clip_on": False, "zorder": 5, "label": "held out, first and last"}
    upper.plot([0, last], held_out, "D", **diamonds)
    upper.set_ylabel(f"loss ({unit})")
    upper.margins(y=0.1)
    places, spent = zip(*epsilons, strict=True)
    most = f"{math.ceil(spent[-1] * 1e3) / 1e3:g}" if math.isfinite(spent[-1]) else "∞"
    lower.plot(places, spent, color=ORANGE, linewidth=2.0, label=f"spent: ε ≤ {most}")
    label = f"most that may be spent: {budget[0]:g}"
    lower.axhline(budget[0], color=BLACK, linewidth=1.2, linestyle="--", label=label)
    lower.set_ylim(0.0, 1.15 * max(budget[0], *spent))
    lower.set_ylabel(f"ε at δ = {budget[1]:.3g}")
    lower.set_xlabel("private step")
    lower.set_xlim(0, last)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
