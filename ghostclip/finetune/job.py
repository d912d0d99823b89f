"""The main job, in order: check, plan, train privately, write the results.

Everything that can be refused is refused before the output folder is touched.
"""

from __future__ import annotations

import logging
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ghostclip._files import reason_of, require_plotting
from ghostclip.distributed.agreement import from_first, is_known_to_all, refused_together
from ghostclip.errors import GhostClipError, InvalidOptionError, OutputError
from ghostclip.finetune import run as files
from ghostclip.finetune.models import require_known_model
from ghostclip.finetune.options import FinetuneOptions, require_together, resumed_options
from ghostclip.finetune.ranks import Ranks, joined, require_same
from ghostclip.finetune.record import plan_text, record_of, result_text, write_all
from ghostclip.finetune.run import FinetuneRun, RunState
from ghostclip.finetune.samples import stay_local
from ghostclip.terminal import Working

if TYPE_CHECKING:
    # They load transformers, which is told beforehand whether it may use the network.
    from ghostclip.finetune.training import FinetuneTrainer
    from ghostclip.integrations.transformers import DPTrainingArguments

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
    with refused_together("options"):
        options, state = _options(args, ranks)
        require_same(options)
    stay_local(options.model, options.tokenizer)
    with Working("preparing"), refused_together("preparations"):
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
        require_together(args)
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
        with refused_together("results"):
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
        with refused_together("resume point"):
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
    with Working("evaluating"), trainer.averaged():
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
