"""Single layers, as Opacus's own micro-benchmarks shape them, behind one interface: a tensor in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Positions of query, keys and values in the one input of the attention layer.
TARGETS, SOURCES = 64, 128


class Recurrent(nn.Module):
    """A recurrent layer whose only result is its outputs.

    Args:
        layer: The layer, batch axis first.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTI: Tensor) -> Tensor:
        """The outputs `[B, T, O]`."""
        return self.layer(x_BTI)[0]


class Attention(nn.Module):
    """An attention layer that takes query, keys and values as one tensor, one after the other along the positions.

    Args:
        layer: The layer, batch axis first.
    """

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTI: Tensor) -> Tensor:
        """The attended values `[B, 64, I]`."""
        query, key, value = x_BTI.split([TARGETS, SOURCES, SOURCES], dim=1)
        return self.layer(query, key, value)[0]


class ChannelsLast(nn.Module):
    """A layer whose channels, the classes of its outputs, are moved to the end.

    Args:
        layer: The layer, channels after the batch.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The outputs `[B, ..., channels]`."""
        return self.layer(x).movedim(1, -1)


@dataclass(frozen=True)
class Layer:
    """A layer and the shape of its input.

    Attributes:
        title: What a reader sees.
        make: Builds it.
        shape: Of one sample's input; empty for one token.
        logits: Of one sample's output: the last axis is that of the classes.
        tokens: Rows of the table that the input's ids are below; 0 for an input of real numbers.
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    logits: tuple[int, ...]
    tokens: int = 0

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Random inputs and classes.

        Args:
            samples: How many.

        Returns:
            `[B, *shape]` and `[B, *logits[:-1]]`.
        """
        if self.tokens:
            inputs = torch.randint(0, self.tokens, (samples, *self.shape))
        else:
            inputs = torch.randn(samples, *self.shape)
        return inputs, torch.randint(0, self.logits[-1], (samples, *self.logits[:-1]))


def _recurrent(kind: type[nn.RNNBase]) -> Callable[[], nn.Module]:
    return lambda: Recurrent(kind(100, 100, bias=False, batch_first=True))


def _attention() -> nn.Module:
    return Attention(nn.MultiheadAttention(100, 4, batch_first=True))


def _conv() -> nn.Module:
    return ChannelsLast(nn.Conv2d(64, 64, 8))


def _instance_norm() -> nn.Module:
    return ChannelsLast(nn.InstanceNorm1d(256, affine=True))


SEQUENCE = (128, 100)
LAYERS = {
    "linear": Layer("Linear 512→512", lambda: nn.Linear(512, 512), (512,), (512,)),
    "conv": Layer("Conv2d 64→64, 8×8, on 50×100", _conv, (64, 50, 100), (43, 93, 64)),
    "layernorm": Layer("LayerNorm 64", lambda: nn.LayerNorm(64), (64,), (64,)),
    "instancenorm": Layer("InstanceNorm1d 256 on 256×64", _instance_norm, (256, 64), (64, 256)),
    "groupnorm": Layer("GroupNorm 16 of 256", lambda: nn.GroupNorm(16, 256), (256,), (256,)),
    "embedding": Layer("Embedding 20,000×100, one token", lambda: nn.Embedding(20_000, 100), (), (100,), tokens=20_000),
    "mha": Layer(
        "MultiheadAttention 100, 4 heads, 64 on 128", _attention, (TARGETS + 2 * SOURCES, 100), (TARGETS, 100)
    ),
    "rnn": Layer("RNN 100→100, T 128", _recurrent(nn.RNN), SEQUENCE, SEQUENCE),
    "gru": Layer("GRU 100→100, T 128", _recurrent(nn.GRU), SEQUENCE, SEQUENCE),
    "lstm": Layer("LSTM 100→100, T 128", _recurrent(nn.LSTM), SEQUENCE, SEQUENCE),
}
