"""The loss of each record, where a model of transformers has one of its own, a mean over the batch's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from torch import Tensor, nn

from ghostclip.capture.hooks import in_place_of
from ghostclip.errors import DataError, LossReductionError, UnsupportedModelError
from ghostclip.language.tasks import Task, evaluating, task_of, with_decoder_inputs, without_adapters
from ghostclip.language.vocabulary_head import alike, few_tokens, refusal, use_fused, with_loss, without_logits

OWN: Final = (
    "pass compute_loss_func=, a function of (outputs, labels, num_items_in_batch) that returns one loss per record"
)
"""What helps where a model's loss is not known."""


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
    given = {name: value for name, value in inputs.items() if name not in labels}
    if task.decodes:
        given = with_decoder_inputs(bare, given, labels["labels"])
    outputs = model(**given)
    return task.losses(outputs, labels, bare.config, smoothing), outputs


def by_record(model: nn.Module, choice: str, *, allowed: bool) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a factory of contexts in which ``model(..., labels=labels).loss`` has shape (B,)."""
    # None where the model's loss is not changed: `choice` is "logits", or it is no language model of transformers.
    # "fused" refuses a model that does not fit; `allowed`: losses may be computed without logits.
    if choice == "logits":
        return None
    bare = without_adapters(model)
    reason = _reason_against(bare)
    if reason:
        if choice == "fused":
            raise UnsupportedModelError(refusal(bare, reason))
        return None
    fused = use_fused(bare, choice, allowed=allowed)
    return lambda: without_logits(bare) if fused else _with_logits(bare)


def _reason_against(model: nn.Module) -> str:
    """Return why a model's own loss cannot be replaced by one loss per record; a few tokens are tried."""
    task = task_of(model)
    if task is None or not task.predicts:
        return "it is no causal, masked or sequence-to-sequence language model of transformers"
    try:
        weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
        ids = few_tokens(weight)
        with evaluating(model):
            own = model(input_ids=ids, labels=ids).loss
            with _with_logits(model):
                ours = model(input_ids=ids, labels=ids).loss
        same = alike(own, ours.mean(), weight.dtype)
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
        return with_loss(outputs, task.losses(outputs, {"labels": labels}, config, 0.0))

    with in_place_of(model, run):
        yield
