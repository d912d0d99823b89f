"""A run: everything is loaded and checked here before anything is written; what an interrupted one goes on from.

Its output folder is chosen, and refused where it would be overwritten. Its mechanism says how much noise over how many
steps, and what its (ε, δ) assumes.

Symbols: N training samples, B expected batch size, q = B/N sampling rate, σ noise multiplier.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from ghostclip import _torch
from ghostclip.accounting import get_noise_multiplier
from ghostclip.accounting.calibration import DEFAULT_ACCOUNTANT, bounding_accountant, epsilon_too_large
from ghostclip.distributed.agreement import from_first
from ghostclip.distributed.weights import gathered_whole
from ghostclip.errors import InvalidOptionError, OutputError, ResumeError
from ghostclip.finetune import DEFAULT_EPOCHS, FinetuneOptions, models
from ghostclip.finetune.models import Quality, Ranks, divide, held_out_quality, is_in_parts, try_private
from ghostclip.finetune.samples import BYTES, choose_tokens, read_samples
from ghostclip.privacy import checkpoints
from ghostclip.privacy.ledger_file import LedgerFile

# What tells of the data: beside the model, so that nobody shares it with the model.
PRIVATE, CARD = "private", "README.md"
RECORD, PLOT, RESUME_FOLDER = f"{PRIVATE}/run.json", f"{PRIVATE}/plot.png", f"{PRIVATE}/resume"
RESUME_STATE, LEDGER = f"{RESUME_FOLDER}/state.pt", f"{RESUME_FOLDER}/ledger.txt"


def choose_folder(requested: Path | None, *, resume: bool) -> Path:
    """Return the folder given; else the newest interrupted run to resume, or the first default that holds nothing."""
    base = FinetuneOptions.output
    if requested is not None:
        return requested
    if resume:
        states = list(base.parent.glob(f"{base.name}*/{RESUME_STATE}"))
        if not states:
            raise ResumeError(f"no interrupted run {base.name}* lies in this folder: name its folder with --output")
        return max(states, key=lambda state: state.stat().st_mtime).parents[2]
    later = (base.with_name(f"{base.name}-{number}") for number in count(2))
    return next(folder for folder in chain([base], later) if not _is_occupied(folder))


def require_usable(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder whose contents a new run would replace, or that cannot be made; changes nothing."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output {folder}: a file lies there, not a folder")
    if _is_occupied(folder) and not overwrite:
        continues = "--resume continues the interrupted run in it, --overwrite"
        remedy = continues if (folder / RESUME_STATE).is_file() else "name another folder; --overwrite"
        raise OutputError(f"--output {folder}: the folder is not empty; {remedy} replaces what lies there")
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise OutputError(
            f"--output {folder}: cannot be written ({nearest} is {'read-only' if nearest.is_dir() else 'a file'})"
        )


def start_anew(folder: Path) -> None:
    """Make the folder, and drop what an earlier run of ours left for resuming; files of others stay."""
    forget_resume(folder)
    (folder / PRIVATE).mkdir(parents=True, exist_ok=True)


def forget_resume(folder: Path) -> None:
    """Delete what a run is resumed from, if there is anything."""
    if (folder / RESUME_FOLDER).exists():
        shutil.rmtree(folder / RESUME_FOLDER)


def save_model(run: FinetuneRun) -> None:
    """Save model and tokenizer so that ``from_pretrained(folder)`` loads them; called in all processes."""
    model, state = run.model, run.model.state_dict()
    # What is tied has one name: parts are gathered one by one, and are not tied any more.
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in state]
    whole = gathered_whole({name: state[name] for name in names})
    if not run.ranks.is_first:
        return
    # A larger model's shards and index, left from the run that is overwritten, would be loaded instead of ours.
    for path in (*run.output.glob("model*.safetensors*"), *run.output.glob("pytorch_model*")):
        path.unlink()
    vars(model.config).update(run.config)
    model.save_pretrained(str(run.output), state_dict=whole)
    run.tokens.save(run.output)


def _is_occupied(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


ACCOUNTANT = DEFAULT_ACCOUNTANT


@dataclass(frozen=True, kw_only=True)
class RunMechanism:
    """A run's private mechanism: ``steps`` Poisson-subsampled Gaussian releases, σ in units of ``max_grad_norm``."""

    passages: int
    batch_size: int
    sample_rate: float
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    target_epsilon: float
    delta: float

    def epsilon_after(self, steps: int) -> float:
        """Return an upper bound on ε after some steps."""
        accountant = bounding_accountant(ACCOUNTANT)
        accountant.history = [(self.noise_multiplier, self.sample_rate, steps)] if steps else []
        return accountant.get_epsilon(self.delta)


def plan_mechanism(options: FinetuneOptions, passages: int) -> RunMechanism:
    """Return the least noise that keeps the whole run within the budget.

    Without ``--delta``, δ = 1/(10 N): a mechanism that publishes one random passage in the clear satisfies δ = 1/N,
    so δ must lie well below that, and a tenth of it is the usual compromise between that and the noise a smaller δ
    costs.
    """
    if options.batch_size > passages:
        raise InvalidOptionError(
            f"--batch-size {options.batch_size} is larger than the data ({passages} training {options.unit}s): "
            f"give at most {passages}, and far less for better privacy"
        )
    rate, epochs = options.batch_size / passages, options.epochs or DEFAULT_EPOCHS
    steps, delta = options.steps or max(1, round(epochs / rate)), options.delta or 1.0 / (10.0 * passages)
    sigma = get_noise_multiplier(
        target_epsilon=options.epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant=ACCOUNTANT
    )
    return RunMechanism(
        passages=passages, batch_size=options.batch_size, sample_rate=rate, steps=steps, noise_multiplier=sigma,
        max_grad_norm=options.max_grad_norm, target_epsilon=options.epsilon, delta=delta,
    )  # fmt: skip


def warnings_about(mechanism: RunMechanism, options: FinetuneOptions) -> list[str]:
    """Return what weakens the guarantee, in one line each, most often nothing."""
    said = (
        (mechanism.delta * mechanism.passages >= 1.0,
         f"δ = {mechanism.delta:.3g} is not below 1/N = {1.0 / mechanism.passages:.3g}: "
         f"publishing one random {options.unit} in the clear would satisfy it"),
        (mechanism.target_epsilon > 10.0, epsilon_too_large(mechanism.target_epsilon)
         or f"ε = {mechanism.target_epsilon:g} promises little: an attacker's odds may grow by e^ε"),
        (options.seed is not None,
         "--seed fixes the split, initial weights and dropout; noise and sampling stay random, as they must"),
        (options.unsafe_noise_seed is not None,
         "--unsafe-noise-seed fixes the noise: whoever knows it removes it, so THIS RUN IS NOT PRIVATE"),
    )  # fmt: skip
    return [line for applies, line in said if applies]


def assumptions(mechanism: RunMechanism, most_per_document: int, options: FinetuneOptions) -> list[str]:
    """Return what the (ε, δ) of a run holds under, and what it does not cover; each thing once."""
    unit = options.unit
    noise = "secure (a cryptographic keystream)" if options.secure_noise else "fast (a statistical generator)"
    said = (
        (True, f"Neighbours: data sets in which one {unit} has nothing in its place, is added, or is removed; the "
         f"number of training {unit}s, {mechanism.passages}, is public."),
        (most_per_document > 1,
         f"A document is several samples (up to {most_per_document} passages), so a whole document is protected far "
         "less than a passage; --max-passages-per-document 1 makes the two the same."),
        (True, f"Mechanism: {mechanism.steps} Gaussian steps on Poisson samples (q = {mechanism.sample_rate:.5g}), "
         f"each {unit}'s gradient clipped to C = {mechanism.max_grad_norm:g}, σ = {mechanism.noise_multiplier:.4f}; "
         f"accountant {ACCOUNTANT!r}; noise {noise}, in floating point, fresh secret key."),
        (True, "Protected: the weights after every step, and so the checkpoint."),
        (True, "Not protected: the losses, batch sizes and speeds shown, plotted and recorded; "
         f"the held-out {unit}s and what was measured on them; choices made by looking at any of these, such as "
         "trying several settings; other uses of the data. Attacks on rounding or timing are not covered."),
        (options.task == "classify" and options.labels is None,
         "Not protected: the list of labels, which was read from the data (--labels states it)."),
        (options.tokenizer not in (None, BYTES), "Assumed: the tokenizer was not trained on this text."),
        (options.model is not None, "Assumed: the initial weights do not depend on this text."),
    )  # fmt: skip
    return [line for applies, line in said if applies]


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
    """A run that can begin; nothing is written. Made in all processes of the run."""

    # `state`: what happened so far; ``lost`` of it counts the steps that the ledger holds and the checkpoint does not,
    # and is None for a new run. `data`: the source of the samples, and their numbers, for the record. `config`: the
    # model's own, as it is written; a training fills no cache.
    def __init__(self, options: FinetuneOptions, state: RunState | None, ranks: Ranks) -> None:
        self.options, self.ranks, self.output = options, ranks, options.output
        self.resume_point, self.ledger = self.output / RESUME_STATE, self.output / LEDGER
        self.mesh, self.device = ranks.mesh(options), ranks.device(options.device)
        seed = options.seed if state is None else state.seed
        seed = from_first("seed", partial(secrets.randbits, 48)) if seed is None else seed
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
            "source": str(options.data or "Python's own documentation (pydoc_data.topics)"),
            "tokens": self.tokens.description, "documents": split.documents,
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
        quality = held_out_quality(self.model, self.split.held_out, self.options)
        for part in _torch.gathered_modules(self.model):
            # A model in parts keeps what it has gathered for a forward without a backward.
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
