"""Linear layers: inputs of every rank, with and without bias, folded batches, odd sizes."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.cases.table import Case, layer_case, on_x, probe_loss


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Stack Linear layers with a Tanh after each."""
    layers = []
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers)


class FoldTokens(nn.Module):
    """Runs its layers on (B*T, d), sample-major, and unfolds again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = mlp(width, 6, 4)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, I) to (B, T, O)."""
        return self.inner(x_BTI.reshape(-1, x_BTI.shape[-1])).unflatten(0, x_BTI.shape[:2])


class FoldTokensMajor(FoldTokens):
    """Folds to (T*B, d): the rows of a sample are strided."""

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, I) to (B, T, O)."""
        return super().forward(x_BTI.transpose(0, 1)).transpose(0, 1)


class FoldAfterLayer(nn.Module):
    """Runs the first layer on (B, T, d) and the second on (B*T, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, I) to (B, T*O)."""
        return self.second(self.first(x_BTI).tanh().view(-1, 6)).view(x_BTI.shape[0], -1)


class Windows(nn.Module):
    """Swin-style windows: (B, H, W, d) becomes (B*windows, positions, d), and back."""

    def __init__(self, window: int, width: int) -> None:
        super().__init__()
        self.window = window
        self.embed = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x_BHWI: Tensor) -> Tensor:
        """Map (B, H, W, I) to itself."""
        batch, height, width, channels = x_BHWI.shape
        k = self.window
        x = self.embed(x_BHWI)
        x = x.view(batch, height // k, k, width // k, k, channels).permute(0, 1, 3, 2, 4, 5)
        x = self.mix(self.norm(x.reshape(-1, k * k, channels))).tanh()
        x = x.view(batch, height // k, width // k, k, k, channels).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(x_BHWI.shape)


class NonContiguous(nn.Module):
    """Feeds a transposed view to a layer and expands a broadcast one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(7, 5)
        self.channels = nn.Linear(4, 3, bias=False)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Mix tokens, then channels, of (B, 7, 4)."""
        mixed = self.tokens(x_BTI.transpose(1, 2)).transpose(1, 2)
        return self.channels(mixed) + self.channels(mixed[:, :1].expand_as(mixed))


def _silent_loss(model: nn.Module, batch: dict) -> Tensor:
    """Give the first sample a loss that does not depend on the model."""
    losses = on_x(model, batch)
    return torch.where(batch["silent"], torch.zeros_like(losses), losses)


CASES = [
    layer_case("linear_2d", lambda: mlp(7, 6, 5), 5, 7),
    layer_case("linear_2d_no_bias", lambda: mlp(7, 6, 5, bias=False), 5, 7),
    layer_case("linear_3d", lambda: mlp(7, 6, 5), 4, 9, 7, tags=("core",)),
    layer_case("linear_3d_no_bias", lambda: mlp(7, 6, 5, bias=False), 4, 9, 7),
    layer_case("linear_4d", lambda: mlp(5, 4, 3), 3, 2, 5, 5),
    layer_case("linear_5d", lambda: mlp(5, 4), 3, 2, 3, 2, 5),
    layer_case("linear_odd_sizes", lambda: mlp(60, 11, 60), 3, 63, 60),
    layer_case("linear_wide_short", lambda: mlp(60, 70), 4, 3, 60),
    layer_case("linear_long_narrow", lambda: mlp(3, 2, 4), 4, 63, 3),
    layer_case("linear_one_sample", lambda: mlp(7, 6, 5), 1, 9, 7),
    layer_case("linear_one_token", lambda: mlp(7, 6, 5), 4, 1, 7),
    layer_case("linear_scalar_features", lambda: mlp(1, 1), 4, 1),
    layer_case("linear_tokens_equal_samples", lambda: mlp(7, 6, 5), 4, 4, 7),
    layer_case("linear_all_sizes_equal", lambda: mlp(4, 4, 4), 4, 4, 4),
    layer_case("linear_folded_whole", lambda: FoldTokens(5), 4, 6, 5),
    layer_case("linear_folded_after_layer", FoldAfterLayer, 4, 6, 5),
    layer_case("linear_folded_tokens_equal_samples", FoldAfterLayer, 4, 4, 5),
    layer_case("linear_folded_one_sample", lambda: FoldTokens(5), 1, 6, 5),
    layer_case("linear_folded_token_major", lambda: FoldTokensMajor(5), 4, 6, 5),
    layer_case("linear_windows", lambda: Windows(2, 5), 3, 4, 6, 5),
    layer_case("linear_windows_equal_samples", lambda: Windows(2, 5), 4, 4, 4, 5),
    layer_case("linear_non_contiguous", NonContiguous, 4, 7, 4),
    Case(
        "linear_batch_second",
        lambda: mlp(7, 6, 5),
        lambda: {"x": torch.randn(9, 4, 7)},
        lambda model, batch: probe_loss(model(batch["x"]), axis=1),
        axes={"x": 1},
        batch_first=False,
    ),
    Case(
        "linear_batch_second_tokens_equal_samples",
        lambda: mlp(7, 6, 5),
        lambda: {"x": torch.randn(4, 4, 7)},
        lambda model, batch: probe_loss(model(batch["x"]), axis=1),
        axes={"x": 1},
        batch_first=False,
    ),
    replace(
        layer_case("linear_silent_sample", lambda: mlp(7, 6, 5), 4, 9, 7, loss=_silent_loss),
        batch=lambda: {"x": torch.randn(4, 9, 7), "silent": torch.tensor([True, False, False, False])},
    ),
]
