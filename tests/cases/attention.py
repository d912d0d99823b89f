"""torch's attention and recurrent modules, batch axis first and second."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.cases.table import Case, layer_case, probe_loss


class SelfAttention(nn.Module):
    """MultiheadAttention on (B, T, d); with batch_first=False the axes are swapped around the module."""

    def __init__(self, *, masked: bool = False, **options: bool) -> None:
        super().__init__()
        self.masked = masked
        self.inp = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, **options)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 6) to itself."""
        h = self.inp(x_BTI)
        h = h if self.attention.batch_first else h.transpose(0, 1)
        causal = (
            nn.Transformer.generate_square_subsequent_mask(x_BTI.shape[1], h.device, h.dtype) if self.masked else None
        )
        out, _ = self.attention(h, h, h, attn_mask=causal, need_weights=not self.masked)
        return out if self.attention.batch_first else out.transpose(0, 1)


class CrossAttention(nn.Module):
    """Queries, keys and values of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, kdim=4, vdim=5, batch_first=True)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 6) to itself."""
        return self.attention(x_BTI, x_BTI[:, 1:, :4].sin(), x_BTI[:, 1:, :5].cos())[0]


class Recurrent(nn.Module):
    """A recurrent module between its input and a Linear on all outputs and the last state."""

    def __init__(self, kind: Callable[..., nn.Module], **options: object) -> None:
        super().__init__()
        self.rnn = kind(4, 5, **options)
        width = (getattr(self.rnn, "proj_size", 0) or 5) * (2 if self.rnn.bidirectional else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 2)."""
        x = x_BTI if self.rnn.batch_first else x_BTI.transpose(0, 1)
        out, _ = self.rnn(x)
        return self.head(out if self.rnn.batch_first else out.transpose(0, 1))


class Packed(nn.Module):
    """An LSTM on a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x_BTI: Tensor, lengths_B: Tensor) -> Tensor:
        """Map (B, T, 4) and lengths to (B, T, 5)."""
        packed = pack_padded_sequence(x_BTI, lengths_B.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x_BTI.shape[1])[0]


class Cells(nn.Module):
    """LSTMCell and GRUCell in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(4, 5)
        self.gru = nn.GRUCell(5, 3)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, 3)."""
        state, out = None, None
        for t in range(x_BTI.shape[1]):
            state = self.lstm(x_BTI[:, t], state)
            out = self.gru(state[0], out)
        return out


class EncoderDecoder(nn.Module):
    """torch's own transformer encoder and decoder layers."""

    def __init__(self, *, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, **options), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoderLayer(6, 2, 8, **options)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 6) to itself."""
        x = x_BTI if self.batch_first else x_BTI.transpose(0, 1)
        out = self.decoder(x, self.encoder(x))
        return out if self.batch_first else out.transpose(0, 1)


class OfEachChannel(nn.Module):
    """Attention among the steps of each channel by itself: channels (or frames) are folded into the batch."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inp, self.shift = nn.Linear(4, 6), nn.Parameter(torch.randn(6))
        self.layer, self.head = layer(), nn.Linear(6, 3)

    def forward(self, x_BCTI: Tensor) -> Tensor:
        """Map (B, C, T, 4) to (B, C, 3)."""
        h = self.layer(self.inp(x_BCTI).flatten(0, 1)).transpose(0, 1).flatten(0, 1) * self.shift
        return self.head(h.view(x_BCTI.shape[2], *x_BCTI.shape[:2], 6)[0])


class PaddedAttention(nn.Module):
    """A key padding mask with another length for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x_BTI: Tensor, padding_BT: Tensor) -> Tensor:
        """Map (B, T, 6) to itself."""
        return self.attention(x_BTI, x_BTI, x_BTI, key_padding_mask=padding_BT)[0]


def _batch_second(name: str, build: Callable[[], nn.Module], length: int, width: int) -> Case:
    """Make a case whose whole model has the batch on axis 1."""
    return Case(
        name,
        build,
        lambda: {"x": torch.randn(length, 4, width)},
        lambda model, batch: probe_loss(_first(model(batch["x"])), axis=1),
        axes={"x": 1},
        batch_first=False,
        tags=frozenset({"attention"}),
    )


def _first(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _attention(name: str, *shape: int, masked: bool = False, **options: bool) -> Case:
    return layer_case(name, lambda: SelfAttention(masked=masked, **options), *shape, tags=("attention",))


def _recurrent(name: str, kind: Callable[..., nn.Module], **options: object) -> Case:
    return layer_case(name, lambda: Recurrent(kind, **options), 3, 4, 4, tags=("recurrent",))


def _encoder_decoder(*, batch_first: bool, norm_first: bool, tokens: int = 5) -> Case:
    name = f"transformer_{'first' if batch_first else 'second'}_{'pre' if norm_first else 'post'}norm_{tokens}"
    build = lambda: EncoderDecoder(batch_first=batch_first, norm_first=norm_first)  # noqa: E731
    return layer_case(name, build, 4, tokens, 6, tags=("attention",))


def _of_each_channel(name: str, *shape: int) -> Case:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    return layer_case(f"transformer_of_each_channel_{name}", lambda: OfEachChannel(layer), *shape, tags=("attention",))


CASES = [
    _attention("mha_batch_first", 4, 5, 6, batch_first=True),
    _of_each_channel("few", 5, 3, 4, 4),
    _of_each_channel("as_many_as_samples", 3, 3, 3, 4),
    _of_each_channel("two", 2, 2, 2, 4),
    _attention("mha_axes_swapped", 4, 5, 6),
    _attention("mha_axes_swapped_tokens_equal_samples", 4, 4, 6),
    _attention("mha_causal", 4, 5, 6, masked=True, batch_first=True),
    _attention("mha_no_bias", 4, 5, 6, bias=False, batch_first=True),
    _attention("mha_bias_kv", 4, 5, 6, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    layer_case("mha_cross", CrossAttention, 4, 5, 6, tags=("attention",)),
    _encoder_decoder(batch_first=True, norm_first=True),
    _encoder_decoder(batch_first=True, norm_first=False),
    _encoder_decoder(batch_first=False, norm_first=True),
    _encoder_decoder(batch_first=False, norm_first=True, tokens=4),
    _batch_second(
        "transformer_whole_model_batch_second", lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), 5, 6
    ),
    _batch_second("lstm_whole_model_batch_second", lambda: nn.LSTM(4, 5), 6, 4),
    _recurrent("lstm_batch_first", nn.LSTM, batch_first=True),
    _recurrent("lstm_axes_swapped", nn.LSTM),
    _recurrent("lstm_two_layers_both_ways", nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
    _recurrent("lstm_projected", nn.LSTM, proj_size=3, batch_first=True),
    _recurrent("gru_batch_first", nn.GRU, batch_first=True),
    _recurrent("gru_no_bias", nn.GRU, bias=False, batch_first=True),
    _recurrent("rnn_tanh", nn.RNN, batch_first=True),
    _recurrent("rnn_relu_both_ways", nn.RNN, nonlinearity="relu", bidirectional=True),
    layer_case("recurrent_cells", Cells, 3, 4, 4, tags=("recurrent",)),
    Case(
        "mha_key_padding",
        PaddedAttention,
        lambda: {"x": torch.randn(4, 5, 6), "padding": torch.arange(5) >= torch.tensor([[5], [2], [4], [1]])},
        lambda model, batch: probe_loss(model(batch["x"], batch["padding"])),
        tags=frozenset({"attention"}),
    ),
    Case(
        "lstm_packed",
        Packed,
        lambda: {"x": torch.randn(4, 6, 4), "lengths": torch.tensor([6, 3, 5, 1])},
        lambda model, batch: probe_loss(model(batch["x"], batch["lengths"])),
        tags=frozenset({"recurrent"}),
    ),
]
