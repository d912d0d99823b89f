"""The models that are measured, in plain `torch.nn`.

Shape suffixes: B samples, T positions, I features, H attention heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Attend to earlier positions, then transform each one, both as residuals."""
        B, T, width = x_BTI.shape
        packed = self.query_key_value(self.attention_norm(x_BTI)).view(B, T, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed_BHTI = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTI = x_BTI + self.attention_out(mixed_BHTI.transpose(1, 2).reshape(B, T, width))
        return x_BTI + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTI))))


class GPT(nn.Module):
    """A GPT with learned positions and an untied head.

    With the defaults, on 16 samples of 128 tokens, forward and backward cost 54.38 GFLOP by `FlopCounterMode` on CPU:
    six per weight of a matrix product and token. (On CPU it does not count fused attention, 3.2 GFLOP without a mask.)
    """

    def __init__(
        self, *, vocabulary: int = 5000, width: int = 256, heads: int = 4, layers: int = 4, positions: int = 128
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, `[B, T, vocabulary]`."""
        # Opacus refuses ids without a batch axis, and ids that are expanded and not copied.
        position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(ids_BT.shape[0], 1)
        x_BTI = self.token(ids_BT) + self.position(position_BT)
        for block in self.blocks:
            x_BTI = block(x_BTI)
        return self.head(self.final_norm(x_BTI))


class MnistCNN(nn.Sequential):
    """The MNIST network of the Opacus paper (Yousefpour et al., 2021, Figure 1), 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )


class MLP(nn.Sequential):
    """Three linear layers on vectors: one position a sample, so a Gram matrix of a sample is 1 x 1."""

    def __init__(self, *, features: int = 784, width: int = 1024, classes: int = 10) -> None:
        super().__init__(
            nn.Linear(features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )


class ResidualBlock(nn.Module):
    """Two convolutions with group norm and a shortcut."""

    def __init__(self, channels: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, out)
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what two convolutions make of the input to the input."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(y)))


class ResNet(nn.Sequential):
    """A residual network with group norm on images of three channels: a stem, three blocks, mean over the image."""

    def __init__(self, *, width: int = 32, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            ResidualBlock(width, width, stride=1),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )


class LSTM(nn.Module):
    """The text classifier of the Opacus paper (Figure 1): embedding, one LSTM layer, mean over time, a linear layer."""

    def __init__(self, *, vocabulary: int = 10_004, width: int = 100) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits `[B, 2]`."""
        return self.head(self.lstm(self.token(ids_BT))[0].mean(1))
