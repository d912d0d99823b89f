"""The main job, in order: check, plan, train privately, compare, write the results.

Everything that can be refused is refused before the output folder is touched.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip._files import reason_of, require_plotting, write_text
from ghostclip.errors import GhostClipError, InvalidOptionError, OutputError
from ghostclip.finetune import output as files
from ghostclip.finetune.models import require_known_model
from ghostclip.finetune.options import FinetuneOptions, require_together, resumed_options
from ghostclip.finetune.plot import Curves, draw
from ghostclip.finetune.ranks import Ranks, is_broken_connection, joined, refused_by_all, require_same
from ghostclip.finetune.tokens import stay_local
from ghostclip.terminal import Working

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ghostclip.finetune.checkpoint import Interrupted
    from ghostclip.finetune.comparison import Comparison
    from ghostclip.finetune.losses import Quality
    from ghostclip.finetune.prepare import Prepared
    from ghostclip.finetune.progress import ProgressBar
    from ghostclip.finetune.record import Outcome
    from ghostclip.finetune.training import PrivateTraining

EXIT_REFUSED, EXIT_INTERRUPTED = 2, 130


def run(given: dict[str, object]) -> int:
    """Run the job.

    Args:
        given: The options that were given, by field name of ``FinetuneOptions``.

    Returns:
        The exit status: 0, or 130 when it was interrupted and can be resumed.

    Raises:
        OutputError: A result could not be written; the run can be continued.
    """
    ranks = Ranks.started()
    try:
        with joined(ranks):
            return _run(given, ranks)
    except (GhostClipError, OSError) as error:
        if ranks.is_first or not _is_known_to_all(error):
            raise
        return EXIT_REFUSED


def _run(given: dict[str, object], ranks: Ranks) -> int:
    with refused_by_all("options"):
        options, interrupted = _options(given, ranks)
        require_same(options)
    stay_local(options.model, options.tokenizer)
    with Working("preparing"), refused_by_all("preparations"):
        _require_libraries()
        from ghostclip.finetune.prepare import prepare

        prepared = prepare(options, interrupted, ranks)
    from ghostclip.finetune.report import plan_text, result_text

    print(plan_text(prepared.data, prepared.model_text, prepared.mechanism, state=prepared.state, options=options))
    for line in prepared.warnings:
        print(f"warning: {line}", file=sys.stderr)
    with refused_by_all("beginning of the training"):
        training = _begin(prepared)
    try:
        comparison = _train(prepared, training)
        if prepared.state.step < prepared.mechanism.steps:
            return _interrupted(prepared)
        with refused_by_all("results"):
            outcome = _finish(prepared, training, comparison)
    except KeyboardInterrupt:
        status = _interrupted(prepared)
        if ranks.count > 1:
            # The others may be within a step, and are not waited for.
            raise SystemExit(status) from None
        return status
    except OSError as error:
        if isinstance(error, ConnectionError) or (_is_known_to_all(error) and not ranks.is_first):
            raise
        reason = reason_of(error)
        raise OutputError(
            f"--output {prepared.output}: could not be written ({reason}); once it can be, continue with: "
            f"{_again(prepared)}"
        ) from error
    print(result_text(outcome))
    return 0


def _is_known_to_all(error: Exception) -> bool:
    """Return whether all processes were told of an error; without torch there is one."""
    from ghostclip.distributed.agreement import is_known_to_all

    return is_known_to_all(error)


def _options(given: dict[str, object], ranks: Ranks) -> tuple[FinetuneOptions, Interrupted | None]:
    from ghostclip.distributed import from_first
    from ghostclip.finetune.checkpoint import ResumePoint

    resuming = bool(given.get("resume"))
    if not resuming:
        require_together(given)
    FinetuneOptions(**given).validate()  # type: ignore[arg-type]
    if ranks.count > 1 and given.get("comparison_steps"):
        raise InvalidOptionError(
            "--comparison-steps: a run of several processes is compared with nothing; leave it out"
        )
    asked = given.get("output")
    folder = from_first(
        "output folder", lambda: files.choose_folder(asked if isinstance(asked, Path) else None, resume=resuming)
    )
    if resuming:
        interrupted = from_first("resume point", lambda: ResumePoint.of(folder).load())
        options = resumed_options(interrupted.options, {**given, "output": folder})
        options.validate()
        return options, interrupted
    options = FinetuneOptions(**{**given, "output": folder})  # type: ignore[arg-type]
    require_known_model(options.model)
    from_first("output folder", lambda: files.require_usable(folder, overwrite=options.overwrite))
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
    comparison = Comparison(
        partial(fresh_copy, prepared.model), prepared.options, width=width, device=prepared.device,
        alone=prepared.ranks.count == 1,
    )  # fmt: skip
    try:
        with StopRequest() as stop, ProgressBar(steps=steps, done=state.step, epsilon=training.epsilon) as bar:
            training.run(stop=stop, on_step=_on_step(prepared, training, comparison, bar))
            with refused_by_all("resume point"):
                training.save()
    except torch.OutOfMemoryError as error:
        raise MemoryError(_memory_advice(prepared, str(error).splitlines()[0])) from error
    except RuntimeError as error:
        if not is_broken_connection(error):
            raise
        raise ConnectionError(
            f"another process of the run has gone ({str(error).splitlines()[0]}); continue with: {_again(prepared)}"
        ) from error
    finally:
        training.close()
    return comparison


def _begin(prepared: Prepared) -> PrivateTraining:
    """Make the model private and write the first resume point; where that fails, leave the folder as it was."""
    from ghostclip.distributed import from_first
    from ghostclip.finetune.training import PrivateTraining

    if prepared.lost is not None:
        return PrivateTraining(prepared)
    made = not prepared.output.exists()
    try:
        from_first("output folder", lambda: files.start_anew(prepared.output))
        return PrivateTraining(prepared)
    except OSError as error:
        if not prepared.ranks.is_first:
            raise
        files.forget_resume(prepared.output)
        if made:
            shutil.rmtree(prepared.output, ignore_errors=True)
        raise OutputError(f"--output {prepared.output}: cannot be written ({reason_of(error)})") from error


def _on_step(
    prepared: Prepared, training: PrivateTraining, comparison: Comparison, bar: ProgressBar
) -> Callable[[], None]:
    state = prepared.state

    def on_step() -> None:
        bar.step(state.losses[-1], state.samples[-1] or 0, training.measures.physical_batch)
        comparison.after_private_step(training.measures, left=prepared.mechanism.steps - state.step)

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
    return f"{prepared.ranks.command} --resume --output {prepared.output}"


def _memory_advice(prepared: Prepared, reason: str) -> str:
    return f"out of memory ({reason}); continue with: {_again(prepared)} --physical-batch-size B, with a smaller B"


def _finish(prepared: Prepared, training: PrivateTraining, comparison: Comparison) -> Outcome:
    """Evaluate, compare, write checkpoint, plot and record; then the run cannot be resumed any more."""
    from ghostclip.finetune.models import whole_copy
    from ghostclip.finetune.parts import is_in_parts
    from ghostclip.finetune.prepare import evaluate

    with Working("evaluating"):
        after = evaluate(prepared.model, prepared.split, prepared.options)
    model: PreTrainedModel | None = prepared.model
    if is_in_parts(prepared.mesh):
        model = whole_copy(prepared.model)
    else:
        prepared.model.to("cpu")
    if prepared.ranks.is_first and model is not None:
        files.save_model(model, prepared.tokens, prepared.output)
    comparison.finish(physical_batch=training.measures.physical_batch)
    outcome = _outcome(prepared, training, comparison, after)
    if prepared.ranks.is_first:
        _write(prepared, outcome)
    return outcome


def _write(prepared: Prepared, outcome: Outcome) -> None:
    from ghostclip.finetune import card
    from ghostclip.finetune.record import write_record

    draw(_curves(outcome), prepared.output / files.PLOT)
    write_record(outcome, prepared.output / files.RECORD)
    write_text(prepared.output / card.NAME, card.card(outcome, pad_id=prepared.tokens.pad_id))
    files.forget_resume(prepared.output)


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
        processes=prepared.ranks.count,
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
