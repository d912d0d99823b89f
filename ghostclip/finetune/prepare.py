"""Getting ready: everything of a run is loaded and checked here, before anything is written."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import TYPE_CHECKING

from ghostclip import _torch
from ghostclip.distributed import from_first
from ghostclip.errors import ResumeError
from ghostclip.finetune.measure import Quality, held_out_quality, try_private
from ghostclip.finetune.models import context_length, describe_model, make_model, require_causal
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.privacy import plan_mechanism, warnings_about
from ghostclip.finetune.ranks import Ranks, divide, is_in_parts
from ghostclip.finetune.samples import Split, read_samples
from ghostclip.finetune.sources import describe_source
from ghostclip.finetune.state import FinetuneRun, Interrupted, RunState
from ghostclip.finetune.tokens import choose_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ghostclip.scaling import Mesh


def prepare(options: FinetuneOptions, interrupted: Interrupted | None, ranks: Ranks) -> FinetuneRun:
    """Load and check everything, and write nothing; called in all processes of the run."""
    mesh, device = ranks.mesh(options), ranks.device(options.device)
    state = None if interrupted is None else interrupted.state
    fresh = lambda: secrets.randbits(48) if options.seed is None else options.seed  # noqa: E731
    seed = from_first("seed", fresh) if state is None else state.seed
    tokens = choose_tokens(options.tokenizer, options.model)
    model = make_model(options, tokens, seed=seed)
    split = read_samples(options, tokens, context_length=context_length(model, options), seed=seed)
    width, fingerprint = split.training.width, split.training.fingerprint()
    mechanism = plan_mechanism(options, len(split.training))
    if state is not None and state.fingerprint != fingerprint:
        raise ResumeError("the data (or its tokenizer) changed since the run was interrupted: start anew elsewhere")
    if options.task != "classify":
        require_causal(model, length=width)
    text, config = describe_model(model, options), dict(vars(model.config))
    # A training fills no cache, and writes what it was given into the config; the checkpoint's is what the model said.
    model.config.use_cache = False
    if is_in_parts(mesh):
        divide(model, mesh, device)
    else:
        model.to(device)
    physical = try_private(model, width, options)
    if state is None:
        before = asdict(evaluate(model, split, options, mesh))
        state = RunState(seed=seed, fingerprint=fingerprint, before=before)
    data = {
        "source": describe_source(options.data), "tokens": tokens.description, "documents": split.documents,
        "training": len(split.training), "held_out": len(split.held_out),
        "evaluated": min(options.eval_samples, len(split.held_out)), "most_per_document": split.most_per_document,
        "passage_length": width, "unit": options.unit,
    }  # fmt: skip
    return FinetuneRun(
        options=options, output=options.output, device=device, tokens=tokens, split=split, data=data, model=model,
        model_text=text, config=config, physical_batch=physical, ranks=ranks, mesh=mesh, mechanism=mechanism,
        warnings=(*warnings_about(mechanism, options), *_shortened(split, options)), state=state,
        lost=None if interrupted is None else interrupted.lost,
    )  # fmt: skip


def _shortened(split: Split, options: FinetuneOptions) -> list[str]:
    if not split.shortened:
        return []
    what = "the beginning of their prompt" if options.task == "answers" else "their end"
    return [
        f"{split.shortened} of {split.documents} rows are longer than {split.training.width} tokens and lose {what}"
    ]


def evaluate(model: PreTrainedModel, split: Split, options: FinetuneOptions, mesh: Mesh) -> Quality:
    """Measure how good the model is on held-out samples; called in all processes."""
    if not is_in_parts(mesh):
        return from_first("held-out quality", lambda: held_out_quality(model, split.held_out, options))
    # A model in parts runs in all of them or in none, and keeps what it has gathered for a forward without a backward.
    quality = held_out_quality(model, split.held_out, options)
    for part in _torch.gathered_modules(model):
        part.reshard()
    return quality
