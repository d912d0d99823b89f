"""Getting ready: everything of a run is loaded and checked here, before anything is written."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ghostclip import _torch
from ghostclip.distributed import from_first
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.finetune.checkpoint import Interrupted, RunState
from ghostclip.finetune.losses import Quality, held_out_quality, losses_for
from ghostclip.finetune.models import context_length, describe_model, make_model, require_causal
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.parts import divide, is_in_parts, require_options, shares_samples
from ghostclip.finetune.passages import Split, split_passages
from ghostclip.finetune.privacy import Mechanism, plan_mechanism, warnings_about
from ghostclip.finetune.ranks import ALONE, Ranks
from ghostclip.finetune.record import DataFacts
from ghostclip.finetune.rows import answered_prompts, labelled_texts
from ghostclip.finetune.sources import describe_source, read_documents
from ghostclip.finetune.steps import check_private
from ghostclip.finetune.tokens import Tokens, choose_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ghostclip.scaling import Mesh

EVALUATION_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can begin: everything is loaded and checked, nothing is written.

    ``lost`` counts the steps that the ledger holds and the checkpoint does not; it is None for a new run.
    """

    options: FinetuneOptions
    output: Path
    device: torch.device
    tokens: Tokens
    split: Split
    data: DataFacts
    model: PreTrainedModel
    model_text: str
    ranks: Ranks
    mesh: Mesh
    mechanism: Mechanism
    warnings: tuple[str, ...]
    state: RunState
    lost: int | None


def prepare(options: FinetuneOptions, interrupted: Interrupted | None, ranks: Ranks = ALONE) -> Prepared:
    """Load and check everything, and write nothing; called in all processes of the run.

    Args:
        options: The run's options.
        interrupted: The interrupted run, or ``None`` for a new one.
        ranks: The processes.

    Returns:
        The run, ready to begin.

    Raises:
        ResumeError: The data are not those of the interrupted run.
    """
    mesh = ranks.mesh(options.mesh)
    require_options(mesh, options)
    device = _device(options.device, ranks)
    state = None if interrupted is None else interrupted.state
    seed = state.seed if state is not None else _seed(options)
    tokens = choose_tokens(options.tokenizer, options.model)
    model = make_model(options, tokens, seed=seed)
    split = _split(options, tokens, context_length=context_length(model, options), seed=seed)
    mechanism = plan_mechanism(options, len(split.training))
    if state is not None and state.fingerprint != split.training.fingerprint():
        raise ResumeError("the data (or its tokenizer) changed since the run was interrupted: start anew elsewhere")
    if options.task != "classify":
        require_causal(model, length=split.training.width)
    text = describe_model(model, options)
    if is_in_parts(mesh):
        divide(model, mesh, device)
    else:
        model.to(device)
    _check_private(model, split, options)
    return Prepared(
        options=options, output=options.output, device=device, tokens=tokens, split=split,
        data=_facts(options, tokens, split), model=model, model_text=text, ranks=ranks, mesh=mesh,
        mechanism=mechanism, warnings=(*warnings_about(mechanism, options), *_shortened(split, options)),
        state=state if state is not None else _first_state(model, split, options, seed),
        lost=None if interrupted is None else interrupted.lost,
    )  # fmt: skip


def _split(options: FinetuneOptions, tokens: Tokens, *, context_length: int, seed: int) -> Split:
    if options.task == "answers":
        return answered_prompts(options, tokens, context_length=context_length, seed=seed)
    if options.task == "classify":
        return labelled_texts(options, tokens, context_length=context_length, seed=seed)
    documents = read_documents(options.data, text_column=options.text_column)
    return split_passages(
        documents, tokens, context_length=context_length, most_per_document=options.max_passages_per_document,
        eval_fraction=options.eval_fraction, seed=seed,
    )  # fmt: skip


def _shortened(split: Split, options: FinetuneOptions) -> list[str]:
    if not split.shortened:
        return []
    what = "the beginning of their prompt" if options.task == "answers" else "their end"
    width = split.training.width
    return [f"{split.shortened} of {split.documents} rows are longer than {width} tokens and lose {what}"]


def _device(name: str, ranks: Ranks) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = ranks.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidOptionError(f"--device {name}: not usable on this machine ({reason})") from error
    return device


def _seed(options: FinetuneOptions) -> int:
    return from_first("seed", lambda: secrets.randbits(48)) if options.seed is None else options.seed


def _facts(options: FinetuneOptions, tokens: Tokens, split: Split) -> DataFacts:
    return DataFacts(
        source=describe_source(options.data), tokens=tokens.description, documents=split.documents,
        training=len(split.training), held_out=len(split.held_out),
        evaluated=min(options.eval_samples, len(split.held_out)), most_per_document=split.most_per_document,
        passage_length=split.training.width, unit=options.unit,
    )  # fmt: skip


def _check_private(model: PreTrainedModel, split: Split, options: FinetuneOptions) -> None:
    losses = losses_for(options.task, model, vocabulary_head=options.head)
    check_private(model, losses, width=split.training.width, options=options)


def _first_state(model: PreTrainedModel, split: Split, options: FinetuneOptions, seed: int) -> RunState:
    return RunState(seed=seed, fingerprint=split.training.fingerprint(), before=asdict(evaluate(model, split, options)))


def evaluate(model: PreTrainedModel, split: Split, options: FinetuneOptions) -> Quality:
    """Measure how good the model is on held-out samples; called in all processes.

    Args:
        model: The model, on its device.
        split: The samples.
        options: The run's options.

    Returns:
        The quality.
    """

    def quality() -> Quality:
        return held_out_quality(
            model, split.held_out, task=options.task, limit=options.eval_samples, batch_size=EVALUATION_BATCH,
            dtype=options.dtype,
        )  # fmt: skip

    if not shares_samples(model):
        return from_first("held-out quality", quality)
    # A model in parts runs in all of them or in none, and keeps what it has gathered for a forward without a backward.
    found = quality()
    for part in _torch.gathered_modules(model):
        part.reshard()
    return found
