"""The loss of each record, for the models of transformers whose own loss is a mean over the batch's tokens.

Shapes: B records, T positions, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip.errors import DataError, LossReductionError
from ghostclip.integrations.vocabulary_head import without_logits
from ghostclip.losses import token_losses

OWN = "pass compute_loss_func=, a function of (outputs, labels, num_items_in_batch) that returns one loss a record"


@dataclass(frozen=True)
class Task:
    """A kind of model whose loss is known.

    Attributes:
        losses: From (logits and the like, labels by name, config, label smoothing) to the losses, (B,).
        labels: Names of the inputs that only the loss needs.
        smooths: Whether label smoothing is defined for it.
    """

    losses: Callable[[Any, Mapping[str, Tensor], Any, float], Tensor]
    labels: tuple[str, ...] = ("labels",)
    smooths: bool = True


def task_of(model: nn.Module) -> Task | None:
    """Return the task of a model of transformers, which its class tells.

    Args:
        model: The model; adapters of peft around it do not matter.

    Returns:
        The task; None for another model, whose own loss is taken.
    """
    bare = without_adapters(model)
    for kind in type(bare).__mro__:
        task = _tasks().get(kind.__name__)
        if task is not None:
            return _TRANSLATION if getattr(bare.config, "is_encoder_decoder", False) and task is _CAUSAL else task
    return None


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside one of peft.

    Args:
        model: Any model.

    Returns:
        That of transformers, or the model itself.
    """
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def is_causal(task: Task | None) -> bool:
    """Return whether a task is to predict the next token, so that its head may do without logits."""
    return task is _CAUSAL


def losses_of(
    model: nn.Module, inputs: Mapping[str, Any], task: Task, *, smoothing: float = 0.0, fused: bool = False
) -> tuple[Tensor, Any]:
    """Run a model and return the loss of each record.

    Args:
        model: The model.
        inputs: A batch, labels included; not changed.
        task: The model's.
        smoothing: Label smoothing.
        fused: Whether a causal model's losses are computed without logits, which the outputs then do not hold.

    Returns:
        Losses, (B,), and the outputs.

    Raises:
        DataError: If labels are missing.
        LossReductionError: If label smoothing is asked for where it is not defined.
    """
    missing = [name for name in task.labels if inputs.get(name) is None]
    if missing:
        raise DataError(
            f"the batch has no {missing[0]!r} (it has {', '.join(inputs)}): the loss of {type(model).__name__} needs "
            f"it. Let the collator make it (remove_unused_columns=False keeps columns of other names), or {OWN}."
        )
    if smoothing and not task.smooths:
        raise LossReductionError(f"label_smoothing_factor={smoothing}: not defined for {type(model).__name__}.")
    labels = {name: inputs[name] for name in task.labels}
    bare = without_adapters(model)
    if fused and is_causal(task):
        with without_logits(bare, label_smoothing=smoothing):
            outputs = model(**inputs)
        return outputs["loss"], outputs
    given = {name: value for name, value in inputs.items() if name not in labels}
    if task is _TRANSLATION and "decoder_input_ids" not in given and "decoder_inputs_embeds" not in given:
        given["decoder_input_ids"] = decoder_inputs(bare, labels["labels"])
    outputs = model(**given)
    return task.losses(outputs, labels, bare.config, smoothing), outputs


def decoder_inputs(model: nn.Module, labels_BT: Tensor) -> Tensor:
    """Return what a model makes its decoder's inputs of, given labels: those, moved by one.

    Args:
        model: An encoder-decoder of transformers.
        labels_BT: Ids, -100 where they do not count.

    Returns:
        Ids, (B, T).

    Raises:
        LossReductionError: If the model does not say how.
    """
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


# Each task's losses


def _causal(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    return token_losses(outputs["logits"], _beside(outputs, labels["labels"]), label_smoothing=smoothing)


def _in_place(outputs: Any, labels: Mapping[str, Tensor], config: Any, smoothing: float) -> Tensor:
    beside = _beside(outputs, labels["labels"])
    return token_losses(outputs["logits"], beside, shift=False, label_smoothing=smoothing)


def _beside(outputs: Any, labels_BT: Tensor) -> Tensor:
    """Labels as long as the logits: a soft prompt of peft comes before them, and does not count."""
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


_CAUSAL, _IN_PLACE, _TRANSLATION = Task(_causal), Task(_in_place), Task(_in_place)
_CLASSES, _CHOICES = Task(_classes), Task(_choices)
_ANSWERS = Task(_answers, labels=("start_positions", "end_positions"))
# The tables of transformers' auto classes, the more special first.
_TABLES: tuple[tuple[str, Task], ...] = (
    ("SEQ_TO_SEQ_CAUSAL_LM", _TRANSLATION),
    ("SPEECH_SEQ_2_SEQ", _TRANSLATION),
    ("CAUSAL_LM", _CAUSAL),
    ("IMAGE_TEXT_TO_TEXT", _CAUSAL),
    ("MASKED_LM", _IN_PLACE),
    ("TOKEN_CLASSIFICATION", _IN_PLACE),
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

    found: dict[str, Task] = {}
    for table, task in _TABLES:
        for names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, task)
    return found
