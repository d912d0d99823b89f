"""The main job, in order: check, plan, train privately, compare, write the results.

Everything that can be refused is refused before the output folder is touched.
"""

from __future__ import annotations

import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostclip._files import reason_of, require_plotting
from ghostclip.errors import GhostClipError, InvalidOptionError, OutputError
from ghostclip.finetune import output as files
from ghostclip.finetune.options import FinetuneOptions, require_together, resumed_options
from ghostclip.finetune.progress import ProgressBar, StopRequest
from ghostclip.finetune.ranks import Ranks, is_in_parts, joined, require_same
from ghostclip.finetune.tokens import first_line, stay_local
from ghostclip.terminal import Working

if TYPE_CHECKING:
    from ghostclip.finetune.measure import OrdinarySteps
    from ghostclip.finetune.state import FinetuneRun, Interrupted
    from ghostclip.finetune.training import FinetuneTrainer
    from ghostclip.integrations.transformers import DPTrainingArguments

EXIT_REFUSED, EXIT_INTERRUPTED = 2, 130


def run(given: dict[str, object]) -> int:
    """Run the job with the options that were given, and return the exit status: 130 where it can be resumed."""
    ranks = Ranks.started()
    try:
        with joined(ranks):
            return _run(given, ranks)
    except (GhostClipError, OSError) as error:
        if ranks.is_first or not _is_known_to_all(error):
            raise
        return EXIT_REFUSED


def _is_known_to_all(error: Exception) -> bool:
    """Return whether all processes were told of an error; loads torch, which an error of options does without."""
    from ghostclip.distributed.agreement import is_known_to_all

    return is_known_to_all(error)


def _run(given: dict[str, object], ranks: Ranks) -> int:
    from ghostclip.distributed import refused_together

    with refused_together("options"):
        options, interrupted = _options(given, ranks)
        require_same(options)
    stay_local(options.model, options.tokenizer)
    with Working("preparing"), refused_together("preparations"):
        _require_libraries()
        from ghostclip.finetune.prepare import prepare
        from ghostclip.finetune.report import plan_text
        from ghostclip.finetune.training import training_arguments

        prepared = prepare(options, interrupted, ranks)
        try:
            arguments = training_arguments(prepared)
        except ValueError as error:
            if isinstance(error, GhostClipError):
                raise
            raise InvalidOptionError(f"--device {prepared.device}, --dtype {options.dtype}: {error}") from error
    print(plan_text(prepared))
    for line in prepared.warnings:
        print(f"warning: {line}", file=sys.stderr)
    try:
        return _train_and_write(prepared, arguments)
    except KeyboardInterrupt:
        status = _say_interrupted(prepared)
        if ranks.count > 1:
            # The others may be within a step, and are not waited for.
            raise SystemExit(status) from None
        return status


def _options(given: dict[str, object], ranks: Ranks) -> tuple[FinetuneOptions, Interrupted | None]:
    from ghostclip.distributed import from_first
    from ghostclip.finetune.models import require_known_model

    resuming = bool(given.get("resume"))
    if not resuming:
        require_together(given)
    FinetuneOptions(**given).validate()  # type: ignore[arg-type]
    if ranks.count > 1 and given.get("comparison_steps"):
        raise InvalidOptionError(
            "--comparison-steps: a run of several processes is compared with nothing; leave it out"
        )
    asked = given.get("output")
    chosen = partial(files.choose_folder, asked if isinstance(asked, Path) else None, resume=resuming)
    folder = from_first("output folder", chosen)
    if resuming:
        _require_libraries()
        from ghostclip.finetune.state import ResumePoint

        interrupted = from_first("resume point", ResumePoint.of(folder).load)
        options = resumed_options(interrupted.options, {**given, "output": folder})
        options.validate()
        return options, interrupted
    options = FinetuneOptions(**{**given, "output": folder})  # type: ignore[arg-type]
    require_known_model(options.model)
    from_first("output folder", partial(files.require_usable, folder, overwrite=options.overwrite))
    return options, None


def _require_libraries() -> None:
    try:
        import accelerate
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
    del accelerate, safetensors, tqdm


def _train_and_write(run: FinetuneRun, arguments: DPTrainingArguments) -> int:
    """Train until the steps are spent or stopping is asked for, then write; what happened is on disk afterwards."""
    from ghostclip.distributed import from_first, refused_together
    from ghostclip.finetune.measure import OrdinarySteps
    from ghostclip.finetune.models import fresh_copy
    from ghostclip.finetune.report import result_text
    from ghostclip.finetune.training import FinetuneTrainer

    was_there, trainer = run.output.exists(), None
    ordinary = OrdinarySteps(
        partial(fresh_copy, run.model), run.options, width=run.split.training.width, device=run.device
    )
    if run.ranks.count > 1:
        ordinary.missing = "not measured (several processes)"
    try:
        if run.lost is None:
            from_first("output folder", partial(files.start_anew, run.output))
        with StopRequest() as stop:
            trainer = FinetuneTrainer(run, arguments, stop=stop)
            _train(run, trainer, ordinary)
        if run.unfinished:
            return _say_interrupted(run)
        with refused_together("results"):
            record = _write(run, trainer, ordinary)
    except OSError as error:
        if isinstance(error, ConnectionError) or (_is_known_to_all(error) and not run.ranks.is_first):
            raise
        if run.lost is not None or (trainer is not None and trainer.begun):
            raise OutputError(
                f"--output {run.output}: could not be written ({reason_of(error)}); once it can be, continue with: "
                f"{_again(run)}"
            ) from error
        # Nothing was trained: the folder is left as it was.
        files.forget_resume(run.output)
        if not was_there:
            shutil.rmtree(run.output, ignore_errors=True)
        raise OutputError(f"--output {run.output}: cannot be written ({reason_of(error)})") from error
    print(result_text(run, record, trainer.unchecked))
    return 0


def _train(run: FinetuneRun, trainer: FinetuneTrainer, ordinary: OrdinarySteps) -> None:
    import torch

    from ghostclip.distributed import refused_together

    state, measures = run.state, trainer.measures

    def on_step() -> None:
        bar.step(state.losses[-1], state.samples[-1] or 0, measures.physical_batch)
        ordinary.after_private_step(measures, left=run.mechanism.steps - state.step)

    trainer.on_step = on_step
    try:
        with ProgressBar(steps=run.mechanism.steps, done=state.step, epsilon=trainer.epsilon) as bar:
            trainer.finish()
        with refused_together("resume point"):
            trainer.save()
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"out of memory ({first_line(error)}); continue with: {_again(run)} --physical-batch-size B, with a "
            "smaller B"
        ) from error
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, torch.distributed.DistError):
            raise
        raise ConnectionError(
            f"another process of the run has gone ({first_line(error)}); continue with: {_again(run)}"
        ) from error
    finally:
        trainer.close()


def _write(run: FinetuneRun, trainer: FinetuneTrainer, ordinary: OrdinarySteps) -> dict[str, Any]:
    """Evaluate, compare, write checkpoint, plot and record; then the run cannot be resumed any more."""
    from ghostclip.finetune.models import whole_copy
    from ghostclip.finetune.prepare import evaluate
    from ghostclip.finetune.record import record_of, write_all

    with Working("evaluating"):
        after = evaluate(run.model, run.split, run.options, run.mesh)
    model = whole_copy(run.model) if is_in_parts(run.mesh) else run.model.to("cpu")
    if run.ranks.is_first and model is not None:
        vars(model.config).update(run.config)
        files.save_model(model, run.tokens, run.output)
    ordinary.finish(physical_batch=trainer.measures.physical_batch)
    record = record_of(run, trainer, ordinary, after)
    if run.ranks.is_first:
        write_all(run, record, after)
        files.forget_resume(run.output)
    return record


def _say_interrupted(run: FinetuneRun) -> int:
    step, mechanism = run.state.step, run.mechanism
    print(
        f"\nstopped after step {step} of {mechanism.steps}, ε = {mechanism.epsilon_after(step):.3f} spent so far; "
        f"continue with: {_again(run)}",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _again(run: FinetuneRun) -> str:
    return f"{run.ranks.command} --resume --output {run.output}"
