"""Networks that a sample passes more than once: two towers, triplets, a teacher beside a student.

Shape suffix: B samples.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.architectures.table import SAMPLES, Architecture
from tests.cases import Case


def _encoder() -> nn.Module:
    body = [nn.Conv1d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 5))


class _Siamese(nn.Module):
    """One encoder for both sides of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scale * functional.cosine_similarity(self.encoder(left), self.encoder(right))


class _Towers(nn.Module):
    """An encoder for each side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _encoder(), _encoder()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return functional.pairwise_distance(self.left(left), self.right(right))


class _Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(anchor), self.encoder(near), self.encoder(far)


class _Student(nn.Module):
    """Learns a frozen teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = _encoder().requires_grad_(False), _encoder()

    def forward(self, x: Tensor) -> Tensor:
        return functional.kl_div(self.student(x).log_softmax(-1), self.teacher(x).softmax(-1), reduction="none").sum(-1)


def _inputs(*names: str):
    return lambda: {name: torch.randn(SAMPLES, 3, 6) for name in names}


def _pair_loss(model: nn.Module, batch: dict) -> Tensor:
    return (model(batch["left"], batch["right"]) - 0.3).square()


def _triplet_loss(model: nn.Module, batch: dict) -> Tensor:
    made = model(batch["anchor"], batch["near"], batch["far"])
    return functional.triplet_margin_loss(*made, margin=2.0, reduction="none")


_CASES = [
    Case("siamese network", _Siamese, _inputs("left", "right"), _pair_loss),
    Case("two towers", _Towers, _inputs("left", "right"), _pair_loss),
    Case("triplet", _Triplet, _inputs("anchor", "near", "far"), _triplet_loss),
    Case("distillation", _Student, _inputs("x"), lambda model, batch: model(batch["x"])),
]
ARCHITECTURES = [Architecture("pairs and triplets", case) for case in _CASES]
