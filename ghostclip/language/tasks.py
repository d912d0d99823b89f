"""What models of transformers predict, and the loss of each record from their logits; trials that leave no trace.

Shapes: B records, T positions, V classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip.errors import LossReductionError
from ghostclip.evidence.module_state import restored
from ghostclip.losses import token_losses


@dataclass(frozen=True)
class Task:
    """A kind of model whose loss is known."""

    # from (logits and the like, labels by name, config, label smoothing) to the losses, (B,)
    losses: Callable[[Any, Mapping[str, Tensor], Any, float], Tensor]
    labels: tuple[str, ...] = ("labels",)  # names of the inputs that only the loss needs
    smooths: bool = True  # whether label smoothing is defined for it
    # of a language model, whose head may do without logits, which token a position predicts: the "next" one or the one
    # in its "place"
    predicts: Literal["", "next", "place"] = ""
    decodes: bool = False  # whether a decoder's inputs are made of the labels


def task_of(model: nn.Module) -> Task | None:
    """Return the task of a model of transformers, by its class; None for another model, whose own loss is used."""
    bare = without_adapters(model)
    for kind in type(bare).__mro__:
        task = _tasks().get(kind.__name__)
        if task is not None:
            return _TRANSLATION if getattr(bare.config, "is_encoder_decoder", False) and task is _CAUSAL else task
    return None


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside peft's wrapper, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def decoder_inputs(model: nn.Module, labels_BT: Tensor) -> Tensor:
    """Return the decoder's inputs that a model makes of labels: the labels, shifted by one."""
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if callable(shift):
        made: Tensor = shift(labels=labels_BT)
        return made
    config: Any = model.config
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise LossReductionError(
            f"{type(model).__name__} does not say what its decoder starts with. Let the collator make "
            "decoder_input_ids (DataCollatorForSeq2Seq(..., model=model))."
        )
    moved = labels_BT.new_full(labels_BT.shape, start)
    moved[:, 1:] = labels_BT[:, :-1]
    return moved.masked_fill(moved == -100, config.pad_token_id)


def with_decoder_inputs(model: nn.Module, inputs: Mapping[str, Any], labels_BT: Tensor) -> dict[str, Any]:
    """Return a model's inputs with those of its decoder added, where it has one without inputs."""
    task = task_of(model)
    has_inputs = "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs
    if task is None or not task.decodes or has_inputs:
        return dict(inputs)
    return {**inputs, "decoder_input_ids": decoder_inputs(model, labels_BT)}


# Each task's losses


def _causal(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    return token_losses(outputs["logits"], _beside(outputs, labels["labels"]), label_smoothing=smoothing)


def _in_place(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    beside = _beside(outputs, labels["labels"])
    return token_losses(outputs["logits"], beside, shift=False, label_smoothing=smoothing)


def _beside(outputs: Any, labels_BT: Tensor) -> Tensor:
    """Pad labels to the length of the logits: a soft prompt of peft comes before them, and does not count."""
    more = outputs["logits"].shape[1] - labels_BT.shape[1]
    return functional.pad(labels_BT, (more, 0), value=-100) if more > 0 else labels_BT


def _classes(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    """As `ForSequenceClassificationLoss` of transformers: regression, one class, or several."""
    logits_BV, targets = outputs["logits"], labels["labels"]
    logits_BV = logits_BV.float() if logits_BV.dtype.itemsize < 4 else logits_BV
    kind = getattr(config, "problem_type", None)
    if kind is None:
        whole = targets.dtype in (torch.long, torch.int)
        several = "single_label_classification" if whole else "multi_label_classification"
        kind = "regression" if config.num_labels == 1 else several
    if kind == "single_label_classification":
        return functional.cross_entropy(
            logits_BV, targets.reshape(-1).long(), reduction="none", label_smoothing=smoothing
        )
    if smoothing:
        raise LossReductionError(f"label_smoothing_factor={smoothing} with problem_type={kind!r}: leave it out.")
    targets_BV = targets.reshape(logits_BV.shape).to(logits_BV.dtype)
    if kind == "regression":
        return functional.mse_loss(logits_BV, targets_BV, reduction="none").mean(1)
    return functional.binary_cross_entropy_with_logits(logits_BV, targets_BV, reduction="none").mean(1)


def _answers(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    """Mean of where an answer starts and ends; positions outside of the text do not count."""
    losses = []
    for name in ("start", "end"):
        scores_BT = outputs[f"{name}_logits"]
        scores_BT = scores_BT.float() if scores_BT.dtype.itemsize < 4 else scores_BT
        outside = scores_BT.shape[1]
        places_B = labels[f"{name}_positions"].reshape(-1).clamp(0, outside)
        losses.append(
            functional.cross_entropy(
                scores_BT, places_B, ignore_index=outside, reduction="none", label_smoothing=smoothing
            )
        )
    return (losses[0] + losses[1]) / 2


def _choices(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    return functional.cross_entropy(
        outputs["logits"], labels["labels"].reshape(-1), reduction="none", label_smoothing=smoothing
    )


_CAUSAL, _MASKED = Task(_causal, predicts="next"), Task(_in_place, predicts="place")
_TRANSLATION, _TOKENS = Task(_in_place, predicts="place", decodes=True), Task(_in_place)
_CLASSES, _CHOICES = Task(_classes), Task(_choices)
_ANSWERS = Task(_answers, labels=("start_positions", "end_positions"))
# The tables of transformers' auto classes, the more special first.
_TABLES: tuple[tuple[str, Task], ...] = (
    ("SEQ_TO_SEQ_CAUSAL_LM", _TRANSLATION),
    ("SPEECH_SEQ_2_SEQ", _TRANSLATION),
    ("CAUSAL_LM", _CAUSAL),
    ("IMAGE_TEXT_TO_TEXT", _CAUSAL),
    ("MASKED_LM", _MASKED),
    ("TOKEN_CLASSIFICATION", _TOKENS),
    ("SEQUENCE_CLASSIFICATION", _CLASSES),
    ("IMAGE_CLASSIFICATION", _CLASSES),
    ("VIDEO_CLASSIFICATION", _CLASSES),
    ("AUDIO_CLASSIFICATION", _CLASSES),
    ("QUESTION_ANSWERING", _ANSWERS),
    ("MULTIPLE_CHOICE", _CHOICES),
)


@lru_cache
def _tasks() -> dict[str, Task]:
    """Tasks by class name, as this version of transformers lists them."""
    from transformers.models.auto import modeling_auto

    tasks: dict[str, Task] = {}
    for table, task in _TABLES:
        for names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).values():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault(name, task)
    return tasks


@contextmanager
def own_randomness(seed: int | None = None) -> Iterator[None]:
    """Restore the global random generators afterwards; inside they start at the seed, if there is one."""
    before = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            # Not `torch.manual_seed`, which notes where it was called from for devices that are not in use.
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore the random generators, and what a model's forward writes."""
    with own_randomness(), restored(model):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients, and restore the random generators."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with without_trace(model), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
