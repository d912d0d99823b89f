"""A run: everything is loaded and checked here before anything is written; what an interrupted one goes on from."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ghostclip import _torch
from ghostclip.distributed import from_first
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.finetune import models
from ghostclip.finetune.measure import Quality, held_out_quality, try_private
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.output import LEDGER, RESUME_STATE
from ghostclip.finetune.privacy import plan_mechanism, warnings_about
from ghostclip.finetune.ranks import Ranks, divide, is_in_parts
from ghostclip.finetune.samples import read_samples
from ghostclip.finetune.sources import describe_source
from ghostclip.finetune.tokens import choose_tokens
from ghostclip.privacy import checkpoints
from ghostclip.privacy.ledger_file import LedgerFile

_OPTIONS, _STATE = "finetune_options", "finetune_state"


@dataclass(kw_only=True)
class RunState:
    """State of a run between two steps.

    ``before`` is the held-out quality of the initial weights. ``losses`` and ``samples`` have one entry per step of
    the ledger; ``None`` where none is known.
    """

    seed: int
    fingerprint: str
    before: Any
    losses: list[float | None] = field(default_factory=list)
    samples: list[int | None] = field(default_factory=list)
    sessions: int = 1
    lost: int | None = None

    @property
    def step(self) -> int:
        """Private steps begun."""
        return len(self.losses)


def interrupted_run(output: Path) -> tuple[dict[str, Any], RunState]:
    """Read options and state of an interrupted run, and count steps that were begun after they were saved.

    A step that the ledger holds and the checkpoint does not may have been released before the crash. It stays
    spent: its place in ``losses`` is ``None``, and the run has that many steps less to go.
    """
    path = output / RESUME_STATE
    if not path.is_file():
        raise ResumeError(f"{output}: holds no interrupted run (a finished run cannot be resumed)")
    content = checkpoints.load(path, {"map_location": "cpu"})
    if _OPTIONS not in content or _STATE not in content:
        raise ResumeError(f"{path}: a checkpoint that ghostclip finetune did not write")
    ledger, state = LedgerFile(output / LEDGER), RunState(**content[_STATE])
    ledger.require(content[checkpoints.LEDGER])
    state.lost = max(0, len(ledger.entries) - state.step)
    state.losses += [None] * state.lost
    state.samples += [None] * state.lost
    state.sessions += 1
    return content[_OPTIONS], state


class FinetuneRun:
    """A run that can begin; nothing is written. Made in all processes of the run.

    Attributes:
        options: What was asked.
        state: What happened so far; ``lost`` of it counts the steps that the ledger holds and the checkpoint does not,
            and is None for a new run.
        data: The source of the samples, and their numbers, for the record.
        config: The model's own, as it is written; a training fills no cache.

    Args:
        options: What was asked.
        state: Of an interrupted run; None for a new one.
        ranks: The processes.
    """

    def __init__(self, options: FinetuneOptions, state: RunState | None, ranks: Ranks) -> None:
        self.options, self.ranks, self.output = options, ranks, options.output
        self.resume_point, self.ledger = self.output / RESUME_STATE, self.output / LEDGER
        self.mesh, self.device = ranks.mesh(options), ranks.device(options.device)
        if options.average is not None and is_in_parts(self.mesh):
            raise InvalidOptionError("--average with --mesh: averages of a model in parts are not kept; leave one out")
        fresh = lambda: secrets.randbits(48) if options.seed is None else options.seed  # noqa: E731
        seed = from_first("seed", fresh) if state is None else state.seed
        self.tokens = choose_tokens(options.tokenizer, options.model)
        self.model = models.make_model(options, self.tokens, seed=seed)
        most = models.context_length(self.model, options)
        self.split = split = read_samples(options, self.tokens, context_length=most, seed=seed)
        self.width, fingerprint = split.training.width, split.training.fingerprint()
        self.mechanism = plan_mechanism(options, len(split.training))
        if state is not None and state.fingerprint != fingerprint:
            raise ResumeError("the data (or its tokenizer) changed since the run was interrupted: start anew elsewhere")
        if options.task != "classify":
            models.require_causal(self.model, length=self.width)
        self.model_text, self.config = models.describe_model(self.model, options), dict(vars(self.model.config))
        self.model.config.use_cache = False
        if is_in_parts(self.mesh):
            divide(self.model, self.mesh, self.device)
        else:
            self.model.to(self.device)
        self.physical_batch = try_private(self.model, self.width, options)
        self.state = state or RunState(seed=seed, fingerprint=fingerprint, before=self.evaluate()._asdict())
        self.data: dict[str, Any] = {
            "source": describe_source(options.data), "tokens": self.tokens.description, "documents": split.documents,
            "training": len(split.training), "held_out": len(split.held_out),
            "evaluated": min(options.eval_samples, len(split.held_out)), "most_per_document": split.most_per_document,
            "passage_length": self.width, "unit": options.unit,
        }  # fmt: skip
        self.warnings = warnings_about(self.mechanism, options)
        if split.shortened:
            what = "the beginning of their prompt" if options.task == "answers" else "their end"
            self.warnings += [
                f"{split.shortened} of {split.documents} rows are longer than {self.width} tokens and lose {what}"
            ]

    def evaluate(self) -> Quality:
        """Measure how good the model is on held-out samples; called in all processes."""
        measure = lambda: held_out_quality(self.model, self.split.held_out, self.options)  # noqa: E731
        if not is_in_parts(self.mesh):
            return from_first("held-out quality", measure)
        # A model in parts runs in all of them or in none, and keeps what it has gathered for a forward without a
        # backward.
        quality = measure()
        for part in _torch.gathered_modules(self.model):
            part.reshard()
        return quality

    @property
    def unfinished(self) -> bool:
        """Whether steps are left."""
        return self.state.step < self.mechanism.steps

    @property
    def again(self) -> str:
        """What the run is gone on with, on a command line."""
        return f"{self.ranks.command} --resume --output {self.output}"

    @property
    def averaged(self) -> str:
        """What the weights are an average of, as a sentence goes on; empty for the last ones."""
        said = {"ema": "exponential average over the steps", "tail": "mean over the second half of the steps"}
        return said.get(self.options.average or "", "")

    def entries(self) -> dict[str, Any]:
        """Return the run's own entries of a checkpoint."""
        return {_OPTIONS: self.options.recorded(), _STATE: asdict(self.state)}
