"""The main job, in order: check, plan, train privately, write the results.

Everything that can be refused is refused before the output folder is touched.

What it leaves beside the model are the JSON record, the picture, and the model card; and texts for a person.

Privacy:
    Record and picture hold the exact training losses and batch sizes: they are for whoever may see the data. The card
    says what the mechanism was and what ε is; nothing that was computed from the data without noise.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ghostclip
from ghostclip._files import BLACK, BLUE, ORANGE, PALE, picture, reason_of, require_plotting, write_text
from ghostclip.distributed.agreement import from_first, is_known_to_all, refusals_shared
from ghostclip.errors import GhostClipError, InvalidOptionError, OutputError
from ghostclip.finetune import FinetuneOptions, refuse_ignored, resumed_options
from ghostclip.finetune import run as files
from ghostclip.finetune.models import Quality, Ranks, joined, require_known_model, require_same
from ghostclip.finetune.run import ACCOUNTANT, CARD, PLOT, RECORD, FinetuneRun, RunState, assumptions
from ghostclip.finetune.samples import labels_of, stay_local
from ghostclip.privacy.account import rounded_down, rounded_up
from ghostclip.terminal import working

if TYPE_CHECKING:
    from ghostclip.finetune.training import FinetuneTrainer
    from ghostclip.integrations.transformers import DPTrainingArguments

SCHEMA = 3
# The curve of ε has at most so many points, as each takes time.
_POINTS = 40
_CARD = """---
library_name: {library}
{base}tags:
- differential-privacy
- dp-sgd
---

# {title}

{guarantee}

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


def record_of(run: FinetuneRun, trainer: FinetuneTrainer, after: Quality) -> dict[str, Any]:
    """Return what was asked, what was done, and what the numbers hold under, as plain values."""
    options, mechanism, state, engine = run.options, run.mechanism, run.state, trainer.privacy_engine
    # The engine's own account, not the plan: it counted what was released.
    bounds, used = engine.epsilon_bounds(mechanism.delta), trainer.clipper.resolve_strategy()
    pairs = {name: {"before": state.before[name], "after": value} for name, value in after._asdict().items()}
    quality = {"held_out_loss": pairs["loss"], "held_out_accuracy": pairs["accuracy"]}
    if options.task != "classify":
        of = {name: math.exp(loss) if loss < 700.0 else math.inf for name, loss in pairs["loss"].items()}
        quality = {"held_out_perplexity": of}
    versions = {"ghostclip": ghostclip.__version__, "torch": torch.__version__, "python": platform.python_version()}
    privacy = {
        "private": options.unsafe_noise_seed is None, "epsilon": bounds.upper, "epsilon_lower_bound": bounds.lower,
        "summary": engine.summary(mechanism.delta), "accountant": ACCOUNTANT, "unit": options.unit,
        "steps_spent": state.step, **asdict(mechanism),
        "assumptions": assumptions(mechanism, run.split.most_per_document, options), "warnings": run.warnings,
    }  # fmt: skip
    return {
        "schema": SCHEMA, "versions": versions,
        "machine": {"device": str(run.device), "processes": run.ranks.count},
        "options": options.recorded(), "seed": state.seed, "sessions": state.sessions, "data": run.data,
        "model": run.model_text, "strategy": used if used == options.strategy else f"{used} ({options.strategy})",
        "physical_batch": run.physical_batch, "privacy": privacy, **quality,
        "not_private": {"losses": state.losses, "samples": state.samples},
    }  # fmt: skip


def write_all(run: FinetuneRun, record: dict[str, Any], after: Quality) -> None:
    """Write picture, record and card, each atomically."""
    mechanism, last = run.mechanism, run.state.step
    shown = sorted({round(last * i / _POINTS) for i in range(_POINTS + 1)})
    draw(
        run.output / PLOT, losses=run.state.losses,
        epsilons=[(step, mechanism.epsilon_after(step)) for step in shown],
        held_out=(run.state.before["loss"], after.loss), budget=(mechanism.target_epsilon, mechanism.delta),
        unit="nats per row" if run.options.task == "classify" else "nats per token",
    )  # fmt: skip
    # JSON has no word for numbers that are not finite.
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    text = json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(run.output / RECORD, text + "\n")
    write_text(run.output / CARD, card(run, record))


def loader_of(options: FinetuneOptions) -> str:
    """Return the class that loads the checkpoint, with its library's name."""
    kind = "SequenceClassification" if options.task == "classify" else "CausalLM"
    return f"transformers.AutoModelFor{kind}" if options.lora is None else f"peft.AutoPeftModelFor{kind}"


def card(run: FinetuneRun, record: dict[str, Any]) -> str:
    """Return the model card, in Markdown as Hugging Face has it."""
    options, mechanism, privacy = run.options, run.mechanism, record["privacy"]
    averaged = [f"The weights are the {run.averaged}."] if run.averaged else []
    library, _, kind = loader_of(options).partition(".")
    arguments = ""
    if options.lora is not None and options.task == "classify":
        # Adapters lie on a model that knows neither labels nor padding.
        labels = labels_of(options)
        arguments = f", num_labels={len(labels)}, id2label={dict(enumerate(labels))}, pad_token_id={run.tokens.pad_id}"
    bound = f"ε ≤ {rounded_up(privacy['epsilon'])} at δ = {mechanism.delta:.4g} for one {options.unit}"
    # A path of the machine that trained is nobody's business.
    named = options.model is not None and not Path(options.model).exists()
    return _CARD.format(
        library=library, kind=kind, given=arguments, base=f"base_model: {options.model}\n" if named else "",
        title=run.model_text.partition(", weights from")[0], version=ghostclip.__version__,
        guarantee=f"**{bound}.** {privacy['summary']}"
        if privacy["private"]
        else "**Not private:** the noise was fixed with --unsafe-noise-seed.",
        assumptions="\n".join(f"- {line}" for line in (*privacy["assumptions"], *averaged)),
    )  # fmt: skip


def smoothed(values: Sequence[float]) -> list[float]:
    """Average exponentially over about a fortieth of the run, without pulling the start towards zero."""
    keep = math.exp(-1.0 / max(1.0, len(values) / 40.0))
    totals, weights = (accumulate(of, lambda total, one: keep * total + one) for of in (values, [1.0] * len(values)))
    return [total / weight for total, weight in zip(totals, weights, strict=True)]


def draw(
    path: Path, *, losses: Sequence[float | None], epsilons: Sequence[tuple[int, float]], held_out: Any,
    budget: tuple[float, float], unit: str = "nats per token",
) -> None:  # fmt: skip
    """Draw loss above and ε below, over the private steps, as PNG; the budget is ε and δ."""
    shown = [(step, loss) for step, loss in enumerate(losses, start=1) if loss is not None]
    steps, values = [step for step, _ in shown], [loss for _, loss in shown]
    last, (epsilon_steps, spent) = max(1, len(losses)), zip(*epsilons, strict=True)
    most = f"{math.ceil(spent[-1] * 1e3) / 1e3:g}" if math.isfinite(spent[-1]) else "∞"
    with picture(path, size=(8.0, 5.4)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        upper.plot(steps, values, color=PALE, linewidth=1.0, label="training, each step (not private)")
        upper.plot(steps, smoothed(values), color=BLUE, linewidth=2.0, label="training, smoothed")
        diamonds = {"color": BLACK, "markersize": 7, "clip_on": False, "zorder": 5}
        upper.plot([0, last], held_out, "D", label="held out, first and last", **diamonds)
        upper.set_ylabel(f"loss ({unit})")
        upper.margins(y=0.1)
        lower.plot(epsilon_steps, spent, color=ORANGE, linewidth=2.0, label=f"spent: ε ≤ {most}")
        label = f"most that may be spent: {budget[0]:g}"
        lower.axhline(budget[0], color=BLACK, linewidth=1.2, linestyle="--", label=label)
        lower.set(ylim=(0.0, 1.15 * max(budget[0], *spent)), xlim=(0, last))
        lower.set(ylabel=f"ε at δ = {budget[1]:.3g}", xlabel="private step")


_WIDTH, _LABEL = 100, 14


def plan_text(run: FinetuneRun) -> str:
    """Say what is about to happen."""
    data, mechanism, unit = run.data, run.mechanism, run.options.unit
    rule = "" if run.options.delta is not None else f" (1/(10 N), N = training {unit}s)"
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
        ("privacy", f"ε ≤ {mechanism.target_epsilon:g} at δ = {mechanism.delta:.3g}{rule}, for one {unit}; "
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
        scores = record["held_out_perplexity"]
        quality = ("perplexity", f"{scores['before']:.2f} → {scores['after']:.2f} per token {held_out}")
    else:
        scores = record["held_out_accuracy"]
        quality = ("accuracy", f"{scores['before']:.1%} → {scores['after']:.1%} {held_out}")
    where = str(run.device) if run.ranks.count == 1 else f"{run.device.type} in {run.ranks.count} processes"
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
        ("computed", f"at most {record['physical_batch']} samples at once, clipped by {record['strategy']} on {where}"),
        ("checkpoint", f"{folder} ({adapters}{loader_of(run.options)}.from_pretrained loads it, as {CARD} shows)"),
        ("keep secret", f"{folder / PLOT}, {folder / RECORD} (exact losses: as private as the data)"),
    )


def _page(*items: tuple[str, str]) -> str:
    return "\n".join(
        textwrap.fill(
            text, _WIDTH, initial_indent=(f"{label}:" if label else "").ljust(_LABEL), subsequent_indent=" " * _LABEL,
            break_long_words=False, break_on_hyphens=False,
        )
        for label, text in items
    )  # fmt: skip


EXIT_REFUSED, EXIT_INTERRUPTED = 2, 130


def run(args: dict[str, Any]) -> int:
    """Run the job with the options that were given, and return the exit status: 130 where it can be resumed."""
    ranks = Ranks.started()
    try:
        with joined(ranks):
            return _run(args, ranks)
    except (GhostClipError, OSError) as error:
        if ranks.is_first or not is_known_to_all(error):
            raise
        return EXIT_REFUSED


def _run(args: dict[str, Any], ranks: Ranks) -> int:
    with refusals_shared("options"):
        options, state = _options(args, ranks)
        require_same(options)
    stay_local(options.model, options.tokenizer)
    with working("preparing"), refusals_shared("preparations"):
        _require_libraries()
        from ghostclip.finetune.training import training_arguments

        prepared = FinetuneRun(options, state, ranks)
        try:
            arguments = training_arguments(prepared)
        except ValueError as error:
            raise InvalidOptionError(f"--device {prepared.device}, --dtype {options.dtype}: {error}") from error
    print(plan_text(prepared))
    for line in prepared.warnings:
        print(f"warning: {line}", file=sys.stderr)
    try:
        return _train_and_write(prepared, arguments)
    except KeyboardInterrupt:
        # The other processes may be within a step, and are not waited for.
        raise SystemExit(_say_interrupted(prepared)) from None


def _options(args: dict[str, Any], ranks: Ranks) -> tuple[FinetuneOptions, RunState | None]:
    options = FinetuneOptions(**args)
    if not options.resume:
        refuse_ignored(args)
    choose = partial(files.choose_folder, args.get("output"), resume=options.resume)
    args = {**args, "output": from_first("output folder", choose)}
    if options.resume:
        recorded, state = from_first("resume point", partial(files.interrupted_run, args["output"]))
        return resumed_options(recorded, args), state
    require_known_model(options.model)
    from_first("output folder", partial(files.require_usable, args["output"], overwrite=options.overwrite))
    return FinetuneOptions(**args), None


def _require_libraries() -> None:
    require_plotting()
    try:
        import accelerate  # noqa: F401
        import huggingface_hub
        import transformers
    except ImportError as error:
        raise InvalidOptionError(f"{error.name} is not installed: pip install {error.name}") from error
    # The checkpoint is written after minutes of training; its own progress bars and advice are noise there.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # What cannot be fetched is said once, and not at each of its tries.
    huggingface_hub.utils.logging.set_verbosity(logging.CRITICAL)


def _train_and_write(run: FinetuneRun, arguments: DPTrainingArguments) -> int:
    """Train until the steps are spent or stopping is asked for, then write; what happened is on disk afterwards."""
    from ghostclip.finetune.training import FinetuneTrainer

    was_there, begun = run.output.exists(), run.state.lost is not None
    try:
        if not begun:
            from_first("output folder", partial(files.start_anew, run.output))
        trainer = FinetuneTrainer(run, arguments)
        try:
            _train(run, trainer)
        finally:
            begun = trainer.begun
            trainer.close()
        if run.unfinished:
            return _say_interrupted(run)
        with refusals_shared("results"):
            record = _write(run, trainer)
    except OSError as error:
        if isinstance(error, ConnectionError) or (is_known_to_all(error) and not run.ranks.is_first):
            raise
        said, remedy = "cannot be written", ""
        if begun:
            said, remedy = "could not be written", f"; once it can be, continue with: {run.again}"
        else:
            # Nothing was trained: the folder is left as it was.
            files.forget_resume(run.output)
            if not was_there:
                shutil.rmtree(run.output, ignore_errors=True)
        raise OutputError(f"--output {run.output}: {said} ({reason_of(error)}){remedy}") from error
    print(result_text(run, record, trainer.clipper.coverage().unchecked))
    return 0


def _train(run: FinetuneRun, trainer: FinetuneTrainer) -> None:
    try:
        trainer.finish()
        with refusals_shared("resume point"):
            trainer.save()
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"out of memory ({reason_of(error)}); continue with: {run.again} --physical-batch-size B, with a smaller B"
        ) from error
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, torch.distributed.DistError):
            raise
        raise ConnectionError(
            f"another process of the run has gone ({reason_of(error)}); continue with: {run.again}"
        ) from error


def _write(run: FinetuneRun, trainer: FinetuneTrainer) -> dict[str, Any]:
    """Evaluate, write checkpoint, plot and record; then the run cannot be resumed any more."""
    with working("evaluating"), trainer.averaged():
        after = run.evaluate()
        files.save_model(run)
    record = record_of(run, trainer, after)
    if run.ranks.is_first:
        write_all(run, record, after)
        files.forget_resume(run.output)
    return record


def _say_interrupted(run: FinetuneRun) -> int:
    step, mechanism = run.state.step, run.mechanism
    print(
        f"\nstopped after step {step} of {mechanism.steps}, ε = {mechanism.epsilon_after(step):.3f} spent so far; "
        f"continue with: {run.again}",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED
