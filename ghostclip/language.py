"""What models of transformers predict, and the loss of each record, from their logits or without them.

Causal, masked, and sequence-to-sequence models may do without logits. Nothing of transformers is imported: a model fits
if it names its head (``get_output_embeddings``) and a few tokens have the same loss either way. Trials leave no trace.

Shapes: B records, T positions, I features of a hidden state, V classes, or entries of the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip.capture.hooks import in_place_of
from ghostclip.checks.module_state import restored
from ghostclip.errors import DataError, LossReductionError, UnsupportedModelError
from ghostclip.losses import head_losses, linear_cross_entropy, token_losses


@dataclass(frozen=True)
class Task:
    """A kind of model whose loss is known."""

    # from (logits and the like, labels by name, config, label smoothing) to the losses, (B,)
    losses: Callable[[Any, Mapping[str, Tensor], Any, float], Tensor]
    labels: tuple[str, ...] = ("labels",)  # names of the inputs that only the loss needs
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
def seeded_generators(seed: int | None = None) -> Iterator[None]:
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
    with seeded_generators(), restored(model):
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


CHOICES: Final = ("auto", "fused", "logits")
"""Ways to compute the loss of a head: without logits where the model fits, without them or not at all, from logits."""
LARGE: Final = 8192
"""Words from which logits are worth forming in tiles: of fewer they are no larger than other activations."""
OWN: Final = (
    "pass compute_loss_func=, a function of (outputs, labels, num_items_in_batch) that returns one loss per record"
)
"""What helps where a model's loss is not known."""

_IGNORED: Final = -100
# How far losses may differ by rounding, in 32 bits and in 16.
_ALIKE, _ALIKE_16 = 1e-4, 3e-2


class _Catcher:
    """Replacement of the head during one forward: takes the hidden states and returns scores of no position."""

    def __init__(self, model: nn.Module, head: nn.Linear, options: dict[str, Any], *, of_positions: bool) -> None:
        self.losses: Tensor | None = None  # of the records of the latest forward, or of their positions
        self.hidden: Tensor | None = None  # the head's input, without gradients
        self._model, self._head, self._options, self._of_positions = model, head, options, of_positions
        self._form, self._shifts = _form_of(model), _shifts(model)
        self._labels: Tensor | None = None

    def begin(self, labels_BT: Tensor) -> None:
        """Take the labels of the forward that begins."""
        self._labels, self.losses = labels_BT, None

    def __call__(self, hidden: Tensor) -> Tensor:
        labels = self._labels
        if labels is None or hidden.dim() != 3 or hidden.shape[1] < labels.shape[1] or len(hidden) != len(labels):
            shape = None if labels is None else tuple(labels.shape)
            raise LossReductionError(
                f"a head without logits: hidden states of shape {tuple(hidden.shape)} for labels of {shape}; expected "
                "(B, T, I) and (B, T). Leave logits_to_keep out, or compute the loss from logits."
            )
        # A soft prompt comes before the labels, and does not count.
        labels_BT = functional.pad(labels, (hidden.shape[1] - labels.shape[1], 0), value=_IGNORED)
        options = {**self._form, **self._options, "bias": _bias_of(self._model, self._head)}
        if self._of_positions:
            self.hidden = hidden.detach()
            before, after = (hidden[:, :-1], labels_BT[:, 1:]) if self._shifts else (hidden, labels_BT)
            self.losses = linear_cross_entropy(before, self._head.weight, after, **options)
        else:
            self.losses = head_losses(hidden, self._head.weight, labels_BT, shift=self._shifts, **options)
        # Of no position: a model may add a bias of all words to its logits.
        return hidden.new_zeros(len(hidden), 0, 1)


@contextmanager
def without_logits(model: nn.Module, *, label_smoothing: float = 0.0, reduction: str = "none") -> Iterator[None]:
    """Let a language model compute its loss through a head without logits, where it is given labels by name.

    ``model(input_ids, labels=labels)`` then returns an output with ``loss`` and without logits: a loss of each record,
    the mean over its own counted tokens, or the mean of these. Without labels the model is what it was.

    Privacy:
        A record's loss is a function of that record alone; transformers' own divides by the batch's tokens.

    Args:
        model: A model of transformers, not the wrapper of an adapter or of data parallelism around it.
        label_smoothing: As for ``torch.nn.functional.cross_entropy``.
        reduction: "none" for losses ``(B,)``, "mean" for their mean, "positions" for those of every position that
            predicts one, 0 where the label does not count; then ``hidden_states`` is what the head was given.

    Yields:
        Nothing.

    Raises:
        UnsupportedModelError: Its head is no plain linear layer.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        >>> ids = torch.randint(50, (8, 6))
        >>> with without_logits(model):
        ...     losses = model(input_ids=ids, labels=ids).loss
        >>> losses.shape
        torch.Size([8])
    """
    head = _head_of(model)
    if isinstance(head, str):
        raise UnsupportedModelError(_refusal(model, head))
    options = {"label_smoothing": label_smoothing}
    forward, catcher = model.forward, _Catcher(model, head, options, of_positions=reduction == "positions")

    def run(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return forward(*args, **kwargs)
        catcher.begin(labels)
        with in_place_of(head, catcher):
            outputs = forward(*args, **with_decoder_inputs(model, kwargs, labels))
        if catcher.losses is None:
            raise UnsupportedModelError(_refusal(model, "its forward does not call the head"))
        losses = catcher.losses.mean() if reduction == "mean" else catcher.losses
        changed: Any = _with_loss(outputs, losses, logits=False)
        if catcher.hidden is not None:
            changed["hidden_states"] = catcher.hidden
        catcher.losses = catcher.hidden = None
        return changed

    with in_place_of(model, run):
        yield


def _with_loss(outputs: Any, losses: Tensor, *, logits: bool = True) -> Any:
    """Set the losses of a model's named outputs, without their logits if asked, and return them."""
    if not isinstance(outputs, Mapping):
        message = "return_dict=False: losses of the records are returned by name. Leave it out."
        raise LossReductionError(message)
    changed: Any = outputs
    changed["loss"] = losses
    if not logits:
        changed["logits"] = None
    return changed


def use_fused(model: nn.Module, choice: str, *, allowed: bool = True) -> bool:
    """Decide whether a model's loss is computed without logits."""
    # `allowed`: the caller needs no logits; otherwise "auto" computes them, and "fused" is refused.
    if choice == "logits" or (choice == "auto" and not allowed):
        return False
    needed = (
        "logits are needed (by a loss of the trainer's own, a compute_loss_func or label smoothing with trl's, or by "
        "grad_sample_mode='hooks' or 'graph')"
    )
    head = _head_of(model)
    if choice == "auto" and not isinstance(head, str) and len(head.weight) < LARGE:
        return False
    reason = reason_against(model) if allowed else needed
    if reason and choice == "fused":
        raise UnsupportedModelError(_refusal(model, reason))
    return not reason


def reason_against(model: nn.Module) -> str:
    """Return why a model's loss cannot be computed without logits, empty where it can; a few tokens are tried."""
    head = _head_of(model)
    if isinstance(head, str):
        return head
    ids = _few_tokens(head.weight)
    try:
        with evaluating(model):
            inputs = with_decoder_inputs(model, {"input_ids": ids}, ids)
            plain = token_losses(model(**inputs).logits, ids, shift=_shifts(model))
            with without_logits(model):
                fused = model(input_ids=ids, labels=ids).loss
    except Exception as error:  # noqa: BLE001 - whatever it is, such a model is not run that way
        return f"a trial on a few tokens raised {type(error).__name__}"
    if not _alike(plain, fused, head.weight.dtype):
        return "its logits are no linear map of the last hidden states, up to a factor and a soft cap in its config"
    return ""


def _few_tokens(weight: Tensor) -> Tensor:
    """Return ids ``(2, 5)`` that a model is tried on, from the weight of a head or an embedding."""
    return torch.arange(10, device=weight.device).view(2, 5) % max(2, min(10, len(weight)))


def _alike(losses: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    """Return whether losses differ by rounding alone, in the dtype of the model."""
    tolerance = _ALIKE if dtype.itemsize >= 4 else _ALIKE_16
    return torch.allclose(losses.double(), others.double(), rtol=tolerance, atol=tolerance)


def logits_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logits ``(*L, V)`` of hidden states, scaled and capped as the model does, without gradients."""
    head, form = _head_of(model), _form_of(model)
    assert not isinstance(head, str), "asked about before"
    with torch.no_grad():
        logits = functional.linear(hidden, head.weight, _bias_of(model, head)) * form["logit_scale"]
        cap = form["logit_cap"]
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _shifts(model: nn.Module) -> bool:
    """Return whether a position predicts the next token, as for every model whose task is not known."""
    task = task_of(model)
    return task is None or task.predicts != "place"


def _bias_of(model: nn.Module, head: nn.Linear) -> Tensor | None:
    """Return the bias of the logits, which in BART and its kin is a buffer."""
    bias: Tensor | None = head.bias
    beside = getattr(model, "final_logits_bias", None)
    if not isinstance(beside, Tensor):
        return bias
    row = beside.reshape(-1).to(head.weight.dtype)
    return row if bias is None else row + bias


def _head_of(model: nn.Module) -> nn.Linear | str:
    """Return the vocabulary head of a model, or why there is no usable one."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        return "it names no head (get_output_embeddings)"
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its head is a {type(head).__name__}, no plain Linear"
    if type(head.weight) is not nn.Parameter or head.weight.dim() != 2 or not head.weight.numel():
        return "its head's weight is sharded or quantised"
    return head


def _form_of(model: nn.Module) -> dict[str, Any]:
    """Return the scale, cap and so on of the logits from a model's config."""
    config: Any = getattr(model, "config", None)
    text: Any = getattr(config, "get_text_config", None)
    config = text(decoder=True) if callable(text) else config
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return {"logit_scale": float(scale) / float(divisor), "logit_cap": None if cap is None else float(cap)}


def _refusal(model: nn.Module, reason: str) -> str:
    """Return the error text of a refused loss without logits."""
    return (
        f"{type(model).__name__}: its loss cannot be computed without logits, since {reason}. Let it be computed from "
        "logits (vocabulary_head='logits', or 'auto', which decides by itself)."
    )


def losses_of(
    model: nn.Module, inputs: Mapping[str, Any], task: Task, *, smoothing: float = 0.0, fused: bool = False
) -> tuple[Tensor, Any]:
    """Run a model on a batch with labels and return the loss of each record, ``(B,)``, and the outputs."""
    # `fused`: a language model's losses are computed without logits, which the outputs then lack.
    missing = [name for name in task.labels if inputs.get(name) is None]
    if missing:
        raise DataError(
            f"the batch has no {missing[0]!r} (it has {', '.join(inputs)}): the loss of {type(model).__name__} needs "
            f"it. Let the collator make it (remove_unused_columns=False keeps columns of other names), or {OWN}."
        )
    labels = {name: inputs[name] for name in task.labels}
    bare = without_adapters(model)
    if fused:
        with without_logits(bare, label_smoothing=smoothing):
            outputs = model(**inputs)
        return outputs["loss"], outputs
    arguments = {name: value for name, value in inputs.items() if name not in labels}
    if task.decodes:
        arguments = with_decoder_inputs(bare, arguments, labels["labels"])
    outputs = model(**arguments)
    return task.losses(outputs, labels, bare.config, smoothing), outputs


def by_record(model: nn.Module, choice: str, *, allowed: bool) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a factory of contexts in which ``model(..., labels=labels).loss`` has shape (B,)."""
    # None where the model's loss is not changed: `choice` is "logits", or it is no language model of transformers.
    # "fused" refuses a model that does not fit; `allowed`: losses may be computed without logits.
    if choice == "logits":
        return None
    bare = without_adapters(model)
    reason = _why_not_by_record(bare)
    if reason:
        if choice == "fused":
            raise UnsupportedModelError(_refusal(bare, reason))
        return None
    fused = use_fused(bare, choice, allowed=allowed)
    return lambda: without_logits(bare) if fused else _with_logits(bare)


def _why_not_by_record(model: nn.Module) -> str:
    """Return why a model's own loss cannot be replaced by one loss per record; a few tokens are tried."""
    task = task_of(model)
    if task is None or not task.predicts:
        return "it is no causal, masked or sequence-to-sequence language model of transformers"
    try:
        weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
        ids = _few_tokens(weight)
        with evaluating(model):
            model_loss = model(input_ids=ids, labels=ids).loss
            with _with_logits(model):
                ours = model(input_ids=ids, labels=ids).loss
        same = _alike(model_loss, ours.mean(), weight.dtype)
    except Exception as error:  # noqa: BLE001 - whatever it is, such a model is left alone
        return f"a trial on a few tokens raised {type(error).__name__}"
    return "" if same else "its own loss is another than the mean of its tokens' (an auxiliary or balancing loss?)"


@contextmanager
def _with_logits(model: nn.Module) -> Iterator[None]:
    """Let a language model's loss be one per record, computed from its logits."""
    forward, task, config = model.forward, task_of(model), model.config
    assert task is not None, "looked at before"

    def run(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return forward(*args, **kwargs)
        outputs = forward(*args, **with_decoder_inputs(model, kwargs, labels))
        return _with_loss(outputs, task.losses(outputs, {"labels": labels}, config, 0.0))

    with in_place_of(model, run):
        yield
