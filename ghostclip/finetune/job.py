"""The main job, in order: check, plan, train privately, compare, write the results.

Everything that can be refused is refused before the output folder is touched.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip._files import reason_of, require_plotting, write_text
from ghostclip.errors import InvalidOptionError, OutputError
from ghostclip.finetune import output as files
from ghostclip.finetune.models import require_known_model
from ghostclip.finetune.options import FinetuneOptions, require_together, resumed_options
from ghostclip.finetune.plot import Curves, draw
from ghostclip.finetune.tokens import stay_local
from ghostclip.terminal import Working

if TYPE_CHECKING:
    from ghostclip.finetune.checkpoint import Interrupted
    from ghostclip.finetune.comparison import Comparison
    from ghostclip.finetune.losses import Quality
    from ghostclip.finetune.prepare import Prepared
    from ghostclip.finetune.progress import ProgressBar
    from ghostclip.finetune.record import Outcome
    from ghostclip.finetune.training import PrivateTraining

EXIT_INTERRUPTED = 130


def run(given: dict[str, object]) -> int:
    """Run the job.

    Args:
        given: The options that were given, by field name of ``FinetuneOptions``.

    Returns:
        The exit status: 0, or 130 when it was interrupted and can be resumed.

    Raises:
        OutputError: A result could not be written; the run can be continued.
    """
    _require_one_process()
    options, interrupted = _options(given)
    stay_local(options.model, options.tokenizer)
    _require_libraries()
    from ghostclip.finetune.prepare import prepare
    from ghostclip.finetune.report import plan_text, result_text

    with Working("preparing"):
        prepared = prepare(options, interrupted)
    print(plan_text(prepared.data, prepared.model_text, prepared.mechanism, state=prepared.state, options=options))
    for line in prepared.warnings:
        print(f"warning: {line}", file=sys.stderr)
    training = _begin(prepared)
    try:
        comparison = _train(prepared, training)
        if prepared.state.step < prepared.mechanism.steps:
            return _interrupted(prepared)
        outcome = _finish(prepared, training, comparison)
    except KeyboardInterrupt:
        return _interrupted(prepared)
    except OSError as error:
        reason = reason_of(error)
        raise OutputError(
            f"--output {prepared.output}: could not be written ({reason}); once it can be, continue with: "
            f"{_again(prepared)}"
        ) from error
    print(result_text(outcome))
    return 0


def _require_one_process() -> None:
    """Refuse to be one of several processes that torchrun started: each would train on all records and release them."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        raise InvalidOptionError(
            f"WORLD_SIZE={ranks}: ghostclip finetune trains in one process. Start it without torchrun; a script of "
            "your own trains on several (docs: several devices)."
        )


def _options(given: dict[str, object]) -> tuple[FinetuneOptions, Interrupted | None]:
    from ghostclip.finetune.checkpoint import ResumePoint

    resuming = bool(given.get("resume"))
    if not resuming:
        require_together(given)
    FinetuneOptions(**given).validate()  # type: ignore[arg-type]
    asked = given.get("output")
    folder = files.choose_folder(asked if isinstance(asked, Path) else None, resume=resuming)
    if resuming:
        interrupted = ResumePoint.of(folder).load()
        options = resumed_options(interrupted.options, {**given, "output": folder})
        options.validate()
        return options, interrupted
    options = FinetuneOptions(**{**given, "output": folder})  # type: ignore[arg-type]
    require_known_model(options.model)
    files.require_usable(folder, overwrite=options.overwrite)
    return options, None


def _require_libraries() -> None:
    try:
        import huggingface_hub
        import safetensors
        import tqdm
        import transformers
    except ImportError as error:
        raise InvalidOptionError(f"{error.name} is not installed: pip install 'ghostclip[transformers]'") from error
    require_plotting()
    # The checkpoint is written after minutes of training; its own progress bars and advice are noise there.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # What cannot be fetched is said once, and not at each of its tries.
    huggingface_hub.utils.logging.set_verbosity(logging.CRITICAL)
    del safetensors, tqdm


def _train(prepared: Prepared, training: PrivateTraining) -> Comparison:
    """Train until the steps are spent or stopping is asked for; what happened is on disk afterwards."""
    import torch

    from ghostclip.finetune.comparison import Comparison
    from ghostclip.finetune.interrupts import StopRequest
    from ghostclip.finetune.models import fresh_copy
    from ghostclip.finetune.progress import ProgressBar

    state, steps, width = prepared.state, prepared.mechanism.steps, prepared.split.training.width
    comparison = Comparison(partial(fresh_copy, prepared.model), prepared.options, width=width, device=prepared.device)
    try:
        with StopRequest() as stop, ProgressBar(steps=steps, done=state.step, epsilon=training.epsilon) as bar:
            training.run(stop=stop, on_step=_on_step(prepared, training, comparison, bar))
            training.save()
    except torch.OutOfMemoryError as error:
        raise MemoryError(_memory_advice(prepared, str(error).splitlines()[0])) from error
    finally:
        training.close()
    return comparison


def _begin(prepared: Prepared) -> PrivateTraining:
    """Make the model private and write the first resume point; where that fails, leave the folder as it was."""
    from ghostclip.finetune.training import PrivateTraining

    if prepared.lost is not None:
        return PrivateTraining(prepared)
    made = not prepared.output.exists()
    try:
        files.start_anew(prepared.output)
        return PrivateTraining(prepared)
    except OSError as error:
        files.forget_resume(prepared.output)
        if made:
            shutil.rmtree(prepared.output, ignore_errors=True)
        raise OutputError(f"--output {prepared.output}: cannot be written ({reason_of(error)})") from error


def _on_step(
    prepared: Prepared, training: PrivateTraining, comparison: Comparison, bar: ProgressBar
) -> Callable[[], None]:
    state = prepared.state
    saved = time.monotonic()

    def on_step() -> None:
        nonlocal saved
        bar.step(state.losses[-1], state.samples[-1] or 0, training.measures.physical_batch)
        comparison.after_private_step(training.measures, left=prepared.mechanism.steps - state.step)
        if time.monotonic() - saved >= prepared.options.checkpoint_seconds:
            training.save()
            saved = time.monotonic()

    return on_step


def _interrupted(prepared: Prepared) -> int:
    mechanism, step = prepared.mechanism, prepared.state.step
    print(
        f"\nstopped after step {step} of {mechanism.steps}, ε = {mechanism.epsilon_after(step):.3f} spent so far; "
        f"continue with: {_again(prepared)}",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _again(prepared: Prepared) -> str:
    return f"ghostclip finetune --resume --output {prepared.output}"


def _memory_advice(prepared: Prepared, reason: str) -> str:
    return f"out of memory ({reason}); continue with: {_again(prepared)} --physical-batch-size B, with a smaller B"


def _finish(prepared: Prepared, training: PrivateTraining, comparison: Comparison) -> Outcome:
    """Evaluate, write the checkpoint, compare, and write plot and record; then the run cannot be resumed any more."""
    from ghostclip.finetune import card
    from ghostclip.finetune.prepare import evaluate
    from ghostclip.finetune.record import write_record

    with Working("evaluating"):
        after = evaluate(prepared.model, prepared.split, prepared.options)
    prepared.model.to("cpu")
    files.save_model(prepared.model, prepared.tokens, prepared.output)
    comparison.finish(physical_batch=training.measures.physical_batch)
    outcome = _outcome(prepared, training, comparison, after)
    draw(_curves(outcome), prepared.output / files.PLOT)
    write_record(outcome, prepared.output / files.RECORD)
    write_text(prepared.output / card.NAME, card.card(outcome, pad_id=prepared.tokens.pad_id))
    files.forget_resume(prepared.output)
    return outcome


def _outcome(prepared: Prepared, training: PrivateTraining, comparison: Comparison, after: Quality) -> Outcome:
    from ghostclip.finetune.privacy import assumptions
    from ghostclip.finetune.record import Outcome

    options, mechanism = prepared.options, prepared.mechanism
    bounds, summary = training.guarantee()
    return Outcome(
        options=options,
        output=prepared.output,
        data=prepared.data,
        model=prepared.model_text,
        strategy=training.strategy,
        device=str(prepared.device),
        mechanism=mechanism,
        assumptions=tuple(assumptions(mechanism, prepared.data.most_per_document, options)),
        warnings=prepared.warnings,
        state=prepared.state,
        # The engine's own account, not the plan: it counted what was released.
        epsilon=bounds.upper,
        epsilon_lower=bounds.lower,
        summary=summary,
        unchecked=training.unchecked,
        after=after,
        private=comparison.private_steps(training.measures),
        all_private=training.measures,
        ordinary=comparison.measures,
        ordinary_missing=comparison.missing,
    )


def _curves(outcome: Outcome) -> Curves:
    mechanism = outcome.mechanism
    return Curves(
        losses=outcome.state.losses,
        epsilons=mechanism.curve(outcome.state.step),
        held_out=(outcome.before.loss, outcome.after.loss),
        unit="nats per row" if outcome.options.task == "classify" else "nats per token",
        target_epsilon=mechanism.target_epsilon,
        delta=mechanism.delta,
    )
