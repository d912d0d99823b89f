"""The ways to compute a head's loss that are compared, each as a step of one small GPT.

Shape suffixes: B samples, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import GPT
from ghostclip import GhostClipper
from ghostclip.losses import linear_cross_entropy


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batch."""

    layers: int = 2
    width: int = 256
    vocabulary: int = 50257
    positions: int = 512
    samples: int = 4


class Losses(GPT):
    """A GPT that returns the mean loss of each sample, its head computed in one of several ways."""

    def __init__(self, sizes: Sizes, head: str, *, tied: bool) -> None:
        super().__init__(vocabulary=sizes.vocabulary, width=sizes.width, layers=sizes.layers, positions=sizes.positions)
        self._way = head
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to losses (B,)."""
        x_BTI = self.token(ids_BT) + self.position(
            torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        )
        for block in self.blocks:
            x_BTI = block(x_BTI)
        x_BTI, label_BT = self.final_norm(x_BTI), ids_BT.roll(-1, 1)
        if self._way == "tiles":
            return linear_cross_entropy(x_BTI, self.head.weight, label_BT).mean(1)
        if self._way == "torch":
            whole: Any = functional
            options: Any = getattr(nn, "LinearCrossEntropyOptions", None)
            losses_N = whole.linear_cross_entropy(
                x_BTI.flatten(0, 1), self.head.weight, label_BT.flatten(), reduction="none", options=options()
            )
            return losses_N.view(label_BT.shape).mean(1)
        logits_NV = self.head(x_BTI).flatten(0, 1)
        return functional.cross_entropy(logits_NV, label_BT.flatten(), reduction="none").view(label_BT.shape).mean(1)


class Step:
    """A step of one way: gradients of all parameters, clipped or not."""

    def __init__(self, sizes: Sizes, head: str, strategy: str | None, *, tied: bool) -> None:
        torch.manual_seed(0)
        self.model = Losses(sizes, head, tied=tied)
        self._clipper = None if strategy is None else GhostClipper(self.model, max_grad_norm=1.0, strategy=strategy)

    def step(self, ids_BT: Tensor) -> None:
        """Replace the gradients."""
        self.model.zero_grad(set_to_none=True)
        losses_B = self.model(ids_BT)
        if self._clipper is None:
            losses_B.mean().backward()
        else:
            self._clipper.backward(losses_B)


WAYS: dict[str, tuple[str, str | None]] = {
    "ordinary": ("logits", None),
    "ordinary, torch's linear_cross_entropy": ("torch", None),
    "ordinary, ghostclip.losses.linear_cross_entropy": ("tiles", None),
    "book-keeping, logits": ("logits", "bookkeeping"),
    "two backwards, logits": ("logits", "ghost"),
    "book-keeping, no logits": ("tiles", "bookkeeping"),
    "two backwards, no logits": ("tiles", "ghost"),
}
"""The head's loss and the strategy of each way, by its name."""


def maker(name: str, sizes: Sizes, *, tied: bool) -> Callable[[], Step]:
    """Return what makes the step of a way.

    Args:
        name: One of `WAYS`.
        sizes: Of model and batch.
        tied: Whether the embedding's weight is the head's.
    """
    head, strategy = WAYS[name]
    return lambda: Step(sizes, head, strategy, tied=tied)
