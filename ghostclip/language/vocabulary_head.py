"""The loss of each record of a model of transformers, from its logits or, of language models, without them.

Causal, masked, and sequence-to-sequence models may do without logits. Nothing of transformers is imported: a model fits
if it names its head (``get_output_embeddings``) and a few tokens have the same loss either way.

Shapes: B records, T positions, I features of a hidden state, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip.capture.hooks import in_place_of
from ghostclip.errors import DataError, LossReductionError, UnsupportedModelError
from ghostclip.language.tasks import Task, evaluating, task_of, with_decoder_inputs, without_adapters
from ghostclip.losses import head_losses, linear_cross_entropy, token_losses

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
    if smoothing and not task.smooths:
        raise LossReductionError(f"label_smoothing_factor={smoothing}: not defined for {type(model).__name__}.")
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
