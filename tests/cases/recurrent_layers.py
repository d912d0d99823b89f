"""Layers under Opacus's names, and attention in the forms that ``attention.py`` leaves out."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ghostclip.compat.opacus import layers
from tests.cases.table import Case, layer_case, probe_loss


class Attention(nn.Module):
    """Attention whose weights are an output as well."""

    def __init__(self, *, heads: int = 2, **options: object) -> None:
        super().__init__()
        self.attention = layers.DPMultiheadAttention(6, heads, **options)

    def mask(self, x_BTI: Tensor) -> dict[str, object]:
        """Return what else attention is called with."""
        return {"average_attn_weights": False}

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 6) to (B, features)."""
        first = self.attention.batch_first
        x = x_BTI if first else x_BTI.transpose(0, 1)
        out, weights = self.attention(x, x.sin(), x.cos(), **self.mask(x_BTI))
        out = (out if first else out.transpose(0, 1)).flatten(1)
        return out if weights is None else torch.cat([out, weights.flatten(1)], 1)


class CausalAttention(Attention):
    """A causal mask, said to be one."""

    def mask(self, x_BTI: Tensor) -> dict[str, object]:
        """Return a mask of all samples."""
        hidden = torch.ones(x_BTI.shape[1], x_BTI.shape[1], dtype=torch.bool, device=x_BTI.device).triu(1)
        return {"attn_mask": hidden, "is_causal": True, "need_weights": False}


class MaskedHeads(Attention):
    """A mask for every sample and head, and one of padded keys."""

    def mask(self, x_BTI: Tensor) -> dict[str, object]:
        """Return masks that follow from the data."""
        size, steps = x_BTI.shape[:2]
        far = (x_BTI[:, :, None, 0] - x_BTI[:, None, :, 0]).abs() > 1.5
        place_T = torch.arange(steps, device=x_BTI.device)
        padded = place_T >= 3 + (x_BTI[:, :1, 1] > 0)
        heads = far.repeat_interleave(self.attention.num_heads, 0) & ~torch.eye(
            steps, dtype=torch.bool, device=x_BTI.device
        )
        assert heads.shape[0] == size * self.attention.num_heads
        return {"attn_mask": heads & (place_T > 0), "key_padding_mask": padded}


class WithBias(nn.Module):
    """``SequenceBias`` and a layer on all its steps."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.bias, self.head = layers.SequenceBias(4, batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 4) or (T, B, 4) to one step more."""
        return self.head(self.bias(x))


class Renamed(layers.RenameParamsMixin, nn.Module):
    """Cells inside, under the names of ``torch.nn.RNNCell``."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = layers.RNNLinear(4, 5), layers.RNNLinear(5, 5)
        self.set_rename_map({f"{m}.{kind}": f"{kind}_{m}" for m in ("ih", "hh") for kind in ("weight", "bias")})

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, 5)."""
        h = x_BTI.new_zeros(x_BTI.shape[0], 5)
        for t in range(x_BTI.shape[1]):
            h = (self.ih(x_BTI[:, t]) + self.hh(h)).tanh()
        return h


class Shrinking(nn.Module):
    """``DPLSTMCell`` and ``DPGRUCell`` whose states are cut by ``batch_size_t`` to all their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = layers.DPLSTMCell(4, 5, True), layers.DPGRUCell(5, 5, True)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, 5)."""
        size = x_BTI.shape[0]
        state, g = None, None
        for t in range(x_BTI.shape[1]):
            state = self.lstm(x_BTI[:, t], state, batch_size_t=size)
            g = self.gru(state[0], g, batch_size_t=size)
        return g


class First(nn.Module):
    """A layer with its initial state under Opacus's name."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 5)."""
        return self.rnn(x_BTI, state_init=x_BTI[:, :1].mean(2).new_ones(1, x_BTI.shape[0], 5))[0]


def _eval_encoder() -> nn.Module:
    """An encoder in eval mode, in which torch would take its fused path if no parameter were trained."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


def _of(name: str, build: Callable[[], nn.Module], *shape: int, tag: str = "attention") -> Case:
    case = layer_case(name, build, *(shape or (3, 5, 6)), tags=(tag,))
    return replace(case, dtypes=(torch.float64,))


CASES = [
    _of("attention_weights_of_heads", lambda: Attention(heads=3, batch_first=True)),
    _of("attention_batch_second_square", Attention, 5, 5, 6),
    _of("attention_bias_kv_zero", lambda: Attention(batch_first=True, add_bias_kv=True, add_zero_attn=True)),
    _of("attention_said_causal", lambda: CausalAttention(batch_first=True)),
    _of("attention_masks_of_heads", lambda: MaskedHeads(batch_first=True)),
    replace(_of("encoder_in_eval_mode", _eval_encoder), train=False),
    _of("sequence_bias_first", lambda: WithBias(batch_first=True), 3, 5, 4),
    replace(
        _of("sequence_bias_second", lambda: WithBias(batch_first=False), 5, 3, 4),
        loss=lambda model, batch: probe_loss(model(batch["x"]), axis=1),
        axes={"x": 1},
        batch_first=False,
    ),
    _of("renamed_parameters", Renamed, 3, 4, 4, tag="recurrent"),
    _of("dp_cells", Shrinking, 4, 3, 4, tag="recurrent"),
    _of("dp_gru_state_init", lambda: First(layers.DPGRU), 3, 4, 4, tag="recurrent"),
]
