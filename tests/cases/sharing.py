"""Parameters with several uses: cross terms decide whether the norm is right."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cases.table import Case, ids_case, layer_case, probe_loss


class CalledTwice(nn.Module):
    """One Linear called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to itself."""
        return self.linear(self.linear(x).tanh())


class TiedModules(nn.Module):
    """GPT-2 style: the head is a Linear whose weight is the embedding's."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, 11)."""
        return self.head(self.mix(self.embedding(ids_BT)).tanh())


class Albert(nn.Module):
    """One block run several times."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.inp = nn.Linear(5, 6)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 6)."""
        x = self.inp(x)
        for _ in range(self.repeats):
            x = x + self.block(x)
        return x


class SharedWithCustom(nn.Module):
    """One matrix used by a Linear and by a module without a rule."""

    class _Scorer(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.matrix = weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x @ self.matrix, dim=1)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.scorer = self._Scorer(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to itself."""
        return self.scorer(self.linear(x).tanh())


class ThreeUses(nn.Module):
    """Embedding, Linear and a raw elementwise use of the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6)
        self.linear = nn.Linear(6, 6)
        self.linear.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, 6) to (B, 6, 6)."""
        return self.linear(self.embedding(ids_BT)).tanh() * self.embedding.weight


class SharedBias(nn.Module):
    """Two Linear layers and a LayerNorm that share one bias vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 5)
        self.norm.bias = self.first.bias
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to itself."""
        return self.second(self.norm(self.first(x).tanh()))


class DifferentLengths(nn.Module):
    """One Linear called on tokens and on their mean: two uses of different T, and one of 2-D input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 5)."""
        pooled = self.linear(x_BTI.mean(1)).sin()
        return self.linear(x_BTI) * pooled[:, None] + self.linear(x_BTI[:, :2]).sum(1, keepdim=True)


class TwoConvs(nn.Module):
    """One convolution on two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 2, H, W) to (B, n)."""
        small = functional.avg_pool2d(x, 2)
        return torch.cat([self.conv(x).flatten(1), self.conv(small).tanh().flatten(1)], 1)


class TransposedTie(nn.Module):
    """An autoencoder: the decoder uses the encoder's weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 6) to itself."""
        return functional.linear(self.encoder(x).tanh(), self.encoder.weight.t(), self.bias)


class OutOfOrder(nn.Module):
    """Modules registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.first = nn.Linear(5, 6)
        self.middle = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 3)."""
        return self.last(self.middle(self.first(x).tanh()).tanh())


def _siamese(model: nn.Module, batch: dict) -> Tensor:
    left, right = model(batch["left"]), model(batch["right"])
    return probe_loss(left * right)


CASES = [
    layer_case("shared_linear_twice", CalledTwice, 4, 3, 5, tags=("core", "shared")),
    layer_case("shared_linear_twice_2d", CalledTwice, 4, 5),
    ids_case("shared_tied_head", TiedModules, 4, 6, tags=("core", "shared")),
    ids_case("shared_tied_head_bias", lambda: TiedModules(bias=True), 4, 6),
    ids_case("shared_tied_head_equal_samples", TiedModules, 5, 5),
    ids_case("shared_tied_head_long", TiedModules, 3, 63),
    layer_case("shared_albert", lambda: Albert(3), 4, 3, 5),
    layer_case("shared_with_custom", SharedWithCustom, 4, 3, 5),
    ids_case("shared_three_uses", ThreeUses, 4, 6, vocabulary=6),
    layer_case("shared_bias", SharedBias, 4, 3, 5),
    layer_case("shared_different_lengths", DifferentLengths, 4, 6, 5),
    layer_case("shared_convolution", TwoConvs, 4, 2, 6, 4),
    layer_case("shared_transposed", TransposedTie, 4, 3, 6),
    layer_case("order_of_registration", OutOfOrder, 4, 3, 5),
    Case(
        "shared_siamese",
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda: {"left": torch.randn(4, 5), "right": torch.randn(4, 5)},
        _siamese,
    ),
]
