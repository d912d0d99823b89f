"""A vocabulary head whose logits are never held: tied and not, every option, rows of every layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ghostclip.losses import linear_cross_entropy
from tests.cases.table import Case
from tests.reference import Batch

V, WIDTH = 23, 6


class Head(nn.Module):
    """Embedding, one layer, and a head that returns the loss of every position."""

    def __init__(self, *, tied: bool = False, bias: bool = False, **form: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.form = form

    def hidden(self, ids: Tensor) -> Tensor:
        """Map ids (*L) to hidden states (*L, WIDTH)."""
        return self.mix(self.embedding(ids)).tanh() * 2

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Map hidden states and labels to losses (*L)."""
        return linear_cross_entropy(hidden, self.head.weight, labels, bias=self.head.bias, **self.form)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels (*L) to losses (*L)."""
        return self.losses(self.hidden(ids), labels)


class Shifted(Head):
    """Position t predicts the label at t + 1: the hidden states are a view with gaps."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels (B, T) to losses (B, T - 1)."""
        return self.losses(self.hidden(ids)[:, :-1], labels[:, 1:])


class Folded(Head):
    """Rows of all samples side by side, as losses are often written."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels (B, T) to losses (B, T)."""
        return self.losses(self.hidden(ids).flatten(0, 1), labels.flatten()).view(labels.shape)


class Picked(Head):
    """Only counted positions reach the head."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels (B, T) to losses (B, T), 0 where they do not count."""
        counted = labels != -100
        losses = self.losses(self.hidden(ids)[counted], labels[counted])
        return losses.new_zeros(labels.shape).masked_scatter(counted, losses)


class OnePosition(Head):
    """One prediction a sample."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels (B, T) to losses (B, 1)."""
        return self.losses(self.hidden(ids).mean(1), labels[:, 0]).unsqueeze(1)


class Frozen(Head):
    """The head alone is trained, and its bias."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.embedding.requires_grad_(requires_grad=False)
        self.mix.requires_grad_(requires_grad=False)


class BiasAlone(Head):
    """The bias and what is before the head are trained."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.head.weight.requires_grad_(requires_grad=False)


class Checkpointed(Head):
    """The layer before the head, and the head, run again in the backward."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels (B, T) to losses (B, T)."""
        return checkpoint(super().forward, ids, labels, use_reentrant=False)


class Transposed(Head):
    """The parameter is (WIDTH, V + 3): its transpose is used, without the last rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(V + 3, WIDTH, bias=False)

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Map hidden states and labels to losses (*L)."""
        return linear_cross_entropy(hidden, self.head.weight.t()[:V], labels)


class Torchs(Head):
    """torch's own function, where this version has it."""

    def __init__(self, *, options: bool, tied: bool = False) -> None:
        super().__init__(tied=tied, bias=True)
        self.options = options

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Map hidden states and labels to losses (*L)."""
        options = nn.LinearCrossEntropyOptions() if self.options else None
        found = nn.functional.linear_cross_entropy(
            hidden.flatten(0, -2),
            self.head.weight,
            labels.flatten(),
            linear_bias=self.head.bias,
            reduction="none",
            options=options,
        )
        return found.view(labels.shape)


def _losses(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["ids"], batch["labels"]).mean(1)


def _weighted(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["ids"], batch["labels"]) * batch["shares"]).sum(1)


def _case(
    name: str, build: Callable[[], nn.Module], samples: int = 4, positions: int = 7, *, ignored: bool = False
) -> Case:
    def batch() -> Batch:
        labels = torch.randint(V, (samples, positions))
        if ignored:
            labels[0, 2:] = -100
            labels[-1, 0] = -100
        return {
            "ids": torch.randint(V, (samples, positions)),
            "labels": labels,
            "shares": torch.rand(samples, positions) - 0.3,
        }

    return Case(name, build, batch, _losses)


CASES = [
    replace(_case("head_untied", Head), tags=frozenset({"core"})),
    replace(_case("head_tied", lambda: Head(tied=True)), tags=frozenset({"core"})),
    _case("head_bias", lambda: Head(bias=True)),
    _case("head_tied_bias_long", lambda: Head(tied=True, bias=True), 3, 70),
    _case("head_ignored", lambda: Head(bias=True), ignored=True),
    _case(
        "head_every_option",
        lambda: Head(tied=True, bias=True, label_smoothing=0.1, logit_scale=1.4, logit_cap=1.5, z_loss=0.02),
        ignored=True,
    ),
    replace(_case("head_token_weights", lambda: Head(tied=True)), loss=_weighted),
    _case("head_shifted", lambda: Shifted(tied=True), ignored=True),
    _case("head_folded", lambda: Folded(tied=True, bias=True)),
    _case("head_picked", Picked, ignored=True),
    _case("head_one_position", lambda: OnePosition(bias=True)),
    _case("head_one_sample", lambda: Head(tied=True, bias=True), 1),
    _case("head_alone", Frozen),
    _case("head_bias_alone", BiasAlone),
    replace(_case("head_checkpointed", lambda: Checkpointed(tied=True, bias=True)), tags=frozenset({"checkpoint"})),
    _case("head_transposed_slice", Transposed),
]
if hasattr(nn.functional, "linear_cross_entropy"):
    CASES += [
        _case("head_torch", lambda: Torchs(options=False), ignored=True),
        replace(
            _case("head_torch_chunked", lambda: Torchs(options=True, tied=True), ignored=True),
            reference_build=lambda: Torchs(options=False, tied=True),
        ),
    ]
