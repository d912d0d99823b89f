"""Trainers of trl whose training is private, with their configurations: of texts, of preferences and of rewards.

trl computes log-probabilities with a language-model head of its own, an autograd function that hides what each record
adds to the head's gradient. In a private step the model's own head stands in its place, or for supervised fine-tuning a
head that forms no logits either (`vocabulary_head`, "auto" by default); evaluation keeps trl's.

What a record is: for supervised fine-tuning a row of the prepared data set. With packing that is a *packed row*: ε then
protects rows, and who wrote texts in several rows, or shares a row with others, is protected as these rows are. For
preferences and rewards it is a pair, prompt included: both answers of a pair are clipped together.

Needs trl.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip.data.physical_batches import rows_of
from ghostclip.errors import InvalidOptionError, NotOfferedError
from ghostclip.integrations._host import PrivacyArguments, suggests_fields
from ghostclip.integrations.transformers import DPTrainer
from ghostclip.kernels.bounds import widened
from ghostclip.language import logits_of, without_adapters, without_logits
from ghostclip.losses import token_losses

try:
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise NotOfferedError(
        f"ghostclip.integrations.trl: what it needs of trl cannot be imported ({error}). Install trl, in a version "
        "that ghostclip was tested with."
    ) from error

__all__ = ["DPDPOConfig", "DPDPOTrainer", "DPRewardConfig", "DPRewardTrainer", "DPSFTConfig", "DPSFTTrainer"]

_log = logging.getLogger(__name__)
_LIBRARIES: Final = ("transformers", "accelerate", "trl")
# Logits that are formed at a time for metrics.
_AT_ONCE: Final = 1 << 22
# Sums over pairs, of terms that a pair's own log-probabilities determine.
_PAIRWISE = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"}
    | {"apo_zero", "apo_down", "discopop"}
)


@suggests_fields
@dataclass
class DPSFTConfig(PrivacyArguments, SFTConfig):
    """`SFTConfig` with the options of `PrivacyArguments`; `max_grad_norm` is C, the bound on each row."""


@suggests_fields
@dataclass
class DPDPOConfig(PrivacyArguments, DPOConfig):
    """`DPOConfig` with the options of `PrivacyArguments`; `max_grad_norm` is C, the bound on each pair."""


@suggests_fields
@dataclass
class DPRewardConfig(PrivacyArguments, RewardConfig):
    """`RewardConfig` with the options of `PrivacyArguments`; `max_grad_norm` is C, the bound on each pair."""


class PlainHead:
    """Stands for a model whose caller asks for trl's fused head, and computes the same with the model's own."""

    # `pairs`: the rows are those of pairs, all first parts before all second ones: then each half is a call of its own,
    # whose rows are records. `trained`: log-probabilities are needed with gradients; else only the logits are.
    # `logits`: of the last call with gradients.
    def __init__(self, model: nn.Module, *, pairs: bool, trained: bool) -> None:
        self._model, self._pairs, self._trained = model, pairs, trained
        self.logits: Tensor | None = None

    def __call__(self, *, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Return what trl's head returns where it is asked for, of labels (B, T), else the model's outputs."""
        if not fused_lm_head:
            outputs = self._model(**inputs)
            self._note(outputs.logits)
            return outputs
        assert labels is not None, "trl's head is asked for the log-probabilities of labels"
        rows = labels.shape[0]
        parts = _halves(rows) if self._pairs else [slice(0, rows)]
        scored = [self._scored(rows_of(inputs, rows, part), labels[part]) for part in parts]
        return FusedCausalLMOutput(**{name: torch.cat([part[name] for part in scored]) for name in scored[0]})

    def _scored(self, inputs: dict[str, Any], labels_BT: Tensor) -> dict[str, Tensor]:
        logits_BTV = self._model(**inputs).logits
        labels_BT = _beside(logits_BTV, labels_BT)
        self._note(logits_BTV)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._trained):
            return _token_values(logits_BTV[:, :-1], labels_BT[:, 1:])

    def _note(self, logits_BTV: Tensor) -> None:
        if torch.is_grad_enabled():
            self.logits = logits_BTV


class TiledHead:
    """Stands for a model whose caller asks for trl's fused head, and computes the same with ours, in tiles."""

    # `losses`: of the positions of the last call, (B, T - 1), with gradients; 0 where a label does not count, as `mask`
    # says.
    def __init__(self, model: nn.Module) -> None:
        self._model, self._bare = model, without_adapters(model)
        self.losses: Tensor | None = None
        self.mask: Tensor | None = None

    def __call__(self, *, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Return what trl's head returns, of labels (B, T); log-probabilities without gradients."""
        assert fused_lm_head, "who needs logits asks the model itself"
        assert labels is not None, "trl's head is asked for the log-probabilities of labels"
        with without_logits(self._bare, reduction="positions"):
            outputs = self._model(**inputs, labels=labels)
        self.losses, hidden_BTI = outputs.loss, outputs.hidden_states
        labels_BT = _beside(hidden_BTI, labels)[:, 1:]
        self.mask = labels_BT != -100
        return FusedCausalLMOutput(
            log_probs=-outputs.loss.detach(), label_mask=self.mask, **self._about(hidden_BTI[:, :-1], labels_BT)
        )

    def _about(self, hidden_BTI: Tensor, labels_BT: Tensor) -> dict[str, Tensor]:
        """Return what trl's metrics are made of, from the logits of a few positions at a time."""
        words = len(self._bare.get_output_embeddings().weight)  # type: ignore[operator]
        few = max(1, _AT_ONCE // words)
        pieces = zip(hidden_BTI.flatten(0, 1).split(few), labels_BT.flatten().split(few), strict=True)
        about = [_about(widened(logits_of(self._bare, hidden_NI)), labels_N) for hidden_NI, labels_N in pieces]
        values = {name: torch.cat([piece[name] for piece in about]).view(labels_BT.shape) for name in about[0]}
        return {name: value.masked_fill(labels_BT == -100, 0) for name, value in values.items()}


class DPSFTTrainer(SFTTrainer, DPTrainer):
    """`SFTTrainer` that trains with differential privacy, as `DPTrainer` does.

    A record is a row of the prepared data set; its loss is the mean over its own counted tokens, or that of
    `loss_type="dft"`. With `packing=True` (`packing_strategy="wrapped"`) a packed row is a record: a warning says so.
    """

    _libraries: tuple[str, ...] = _LIBRARIES

    def _require_options(self) -> None:
        if getattr(self, "padding_free", False) and self.args.packing:
            raise InvalidOptionError(
                f"packing_strategy={self.args.packing_strategy!r} puts all packed rows of a batch into one "
                "(padding-free), so that a batch would count as one record. Use packing_strategy='wrapped', or "
                "packing=False."
            )
        if self.args.packing:
            warnings.warn(
                "packing=True: a record is now a packed row, and ε protects one row. Texts of several people share a "
                "row, and a long text is cut into several: unless each row holds the texts of one person, no person is "
                "protected as ε says. packing=False makes each text a record.",
                stacklevel=2,
            )
        super()._require_options()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - Trainer's signature
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean of the rows' losses in a private step; else what trl returns.

        Args:
            model: The model.
            inputs: A batch.
            return_outputs: As Trainer's; not in a private step.
            num_items_in_batch: Not used in a private step.

        Returns:
            The loss, or the loss and the outputs.
        """
        if not self._computing:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._is_fused:
            tiled: Any = TiledHead(model)
            # For its metrics, as below.
            super().compute_loss(tiled, inputs)
            return self._mean_of(_weighted(tiled.losses, tiled.mask, by_chance=self.args.loss_type == "dft"))
        _say_head()
        head: Any = PlainHead(model, pairs=False, trained=False)
        # For its metrics; its loss is divided by the batch's tokens.
        loss = super().compute_loss(head, inputs)
        if self.compute_loss_func is None:
            assert head.logits is not None, "trl's loss runs the model"
            loss = self._row_losses(head.logits, _beside(head.logits, inputs["labels"]))
        return self._mean_of(loss)

    def _needs_logits(self) -> bool:
        """Return whether the loss is another's, or one that trl computes from logits as well."""
        another = type(self).compute_loss is not DPSFTTrainer.compute_loss or self.compute_loss_func is not None
        return another or bool(self.args.label_smoothing_factor)

    def _row_losses(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        if self.args.loss_type != "dft":
            return token_losses(logits_BTV, labels_BT, label_smoothing=float(self.args.label_smoothing_factor))
        values = _token_values(logits_BTV[:, :-1], labels_BT[:, 1:])
        return _weighted(-values["log_probs"], values["label_mask"], by_chance=True)


class _OfPairs:
    """What trainers of pairs have in common, before trl's: each half of a batch is a call of the model of its own."""

    _libraries: tuple[str, ...] = _LIBRARIES

    # Returns what stands for a model: called with all chosen answers and all rejected ones, it calls it twice.
    _in_halves: Callable[[nn.Module], Any]

    def compute_loss(
        self: Any,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - Trainer's signature
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean of the pairs' losses, chosen answers first; the engine proves that it is one."""
        # `return_outputs`, as Trainer's, not in a private step.
        trainer: Any = super()
        if not self._computing:
            return trainer.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return trainer.compute_loss(self._in_halves(model), inputs)

    def _checked_example(self) -> tuple[Any, bool]:
        """Each answer as a text of its own, for the checks."""
        trainer: Any = super()
        batch, lengths_differ = trainer._checked_example()
        return {name: batch[name] for name in ("input_ids", "attention_mask")}, lengths_differ


class DPDPOTrainer(_OfPairs, DPOTrainer, DPTrainer):
    """`DPOTrainer` that trains with differential privacy, as `DPTrainer` does; a pair is a record.

    The model runs once on all chosen answers and once on all rejected ones.
    """

    def _require_options(self) -> None:
        if self.args.vocabulary_head == "fused":
            raise InvalidOptionError(
                "vocabulary_head='fused': preferences compare log-probabilities of both answers, computed from logits. "
                "Use 'auto' or 'logits'."
            )
        kinds = self.args.loss_type if isinstance(self.args.loss_type, (list, tuple)) else [self.args.loss_type]
        mixing = [kind for kind in kinds if kind not in _PAIRWISE]
        if mixing:
            raise InvalidOptionError(
                f"loss_type={mixing[0]!r}: compares pairs with each other, or divides by counts of the whole batch. "
                f"Use one of {', '.join(sorted(_PAIRWISE))}."
            )
        super()._require_options()

    def _in_halves(self, model: nn.Module) -> Any:
        _say_head()
        return PlainHead(model, pairs=True, trained=True)

    def _checked_example(self) -> tuple[Any, bool]:
        """Each answer as a text of its own, for the checks."""
        texts, lengths_differ = super()._checked_example()
        return texts | {"labels": texts["input_ids"].masked_fill(texts["attention_mask"] == 0, -100)}, lengths_differ


class DPRewardTrainer(_OfPairs, RewardTrainer, DPTrainer):
    """`RewardTrainer` that trains with differential privacy, as `DPTrainer` does; a pair is a record.

    The model runs once on all chosen answers and once on all rejected ones.
    """

    def _in_halves(self, model: nn.Module) -> Any:
        def call(**inputs: Any) -> Any:
            rows = inputs["input_ids"].shape[0]
            halves = [model(**rows_of(inputs, rows, half)).logits for half in _halves(rows)]
            return SimpleNamespace(logits=torch.cat(halves))

        return call

    def _record_losses(
        self, model: nn.Module, inputs: Any, *, smoothing: float, logits: bool = False
    ) -> tuple[Tensor, Any]:
        """Return the reward of each text, which the checks look at in the place of losses."""
        outputs = model(**inputs)
        return outputs.logits.squeeze(-1), outputs


def _halves(rows: int) -> list[slice]:
    return [slice(0, rows // 2), slice(rows // 2, rows)]


def _beside(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Labels as long as the logits: a soft prompt of peft comes before them, and does not count."""
    return functional.pad(labels_BT, (logits_BTV.shape[1] - labels_BT.shape[1], 0), value=-100)


def _weighted(losses_BT: Tensor, mask_BT: Tensor, *, by_chance: bool) -> Tensor:
    """Return each row's mean over its counted positions, of "dft" with every token's probability as its weight."""
    counted_BT = mask_BT.to(losses_BT.dtype)
    shares_BT = counted_BT / counted_BT.sum(1, keepdim=True).clamp(min=1)
    if by_chance:
        shares_BT = shares_BT * (-losses_BT).detach().exp()
    return (losses_BT * shares_BT).sum(1)


def _token_values(logits_BTV: Tensor, labels_BT: Tensor) -> dict[str, Tensor]:
    """Return what trl's head says of each label; zero where a label does not count, as there."""
    logits_BTV = widened(logits_BTV)
    mask_BT = labels_BT != -100
    targets_BT = labels_BT.clamp(min=0)
    losses_BT = functional.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
    with torch.no_grad():
        # Row by row: they take as much memory as the logits.
        about = [_about(logits_TV, targets_T) for logits_TV, targets_T in zip(logits_BTV, targets_BT, strict=True)]
    values = {"log_probs": -losses_BT, **{name: torch.stack([row[name] for row in about]) for name in about[0]}}
    return {name: value.masked_fill(~mask_BT, 0) for name, value in values.items()} | {"label_mask": mask_BT}


def _about(logits_TV: Tensor, targets_T: Tensor) -> dict[str, Tensor]:
    logs_TV = logits_TV.log_softmax(-1)
    return {
        "entropy": -(logs_TV.exp() * logs_TV).sum(-1),
        "log_sum_sq_probs": (2 * logs_TV).logsumexp(-1),
        "mean_logits": logits_TV.mean(-1),
        "is_top1": logits_TV.argmax(-1) == targets_T,
    }


@cache
def _say_head() -> None:
    _log.warning("private steps use the model's own language-model head in the place of trl's fused one")
