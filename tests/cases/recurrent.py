"""Recurrent layers and cells in every form: packed, projected, several directions, states of all origins, shared."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.cases.table import Case, layer_case, next_token_loss, probe_loss
from tests.reference import Batch

_LENGTHS = (3, 6, 1, 5)


class Sequence(nn.Module):
    """A recurrent module with a Linear on all outputs and one on the last states."""

    def __init__(self, kind: Callable[..., nn.Module], **options: object) -> None:
        super().__init__()
        self.rnn = kind(4, 5, **options)
        sides = 2 if self.rnn.bidirectional else 1
        self.head = nn.Linear((getattr(self.rnn, "proj_size", 0) or 5) * sides, 2)
        self.last = nn.Linear(getattr(self.rnn, "proj_size", 0) or 5, 3)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, features)."""
        x = x_BTI if self.rnn.batch_first else x_BTI.transpose(0, 1)
        out, ends = self.rnn(x)
        out = self.head(out if self.rnn.batch_first else out.transpose(0, 1))
        states = ends if isinstance(ends, tuple) else (ends,)
        extra = [state.transpose(0, 1).flatten(1) for state in states[1:]]
        return torch.cat([out.flatten(1), self.last(states[0][-1]), *extra], 1)


class PackedRows(nn.Module):
    """Layers before, in and after a packed sequence, also on its rows themselves."""

    def __init__(self, kind: Callable[..., nn.Module], *, embedded: bool = False, **options: object) -> None:
        super().__init__()
        self.before = nn.Embedding(7, 4) if embedded else nn.Linear(4, 4)
        self.rnn = kind(4, 5, **options)
        width = 5 * (2 if self.rnn.bidirectional else 1)
        self.rows, self.after, self.last = nn.Linear(width, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths_B: Tensor) -> Tensor:
        """Map (B, T, ...) and lengths to (B, features)."""
        first, total = self.rnn.batch_first, x.shape[1]
        x = x if first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths_B.cpu(), batch_first=first, enforce_sorted=False)
        packed = packed._replace(data=self.before(packed.data).tanh())
        out, ends = self.rnn(packed)
        out = out._replace(data=self.rows(out.data))
        padded, _ = pad_packed_sequence(out, batch_first=first, total_length=total)
        padded = self.after(padded if first else padded.transpose(0, 1)).flatten(1)
        last = (ends[0] if isinstance(ends, tuple) else ends)[-1]
        return torch.cat([padded, self.last(last)], 1)


class SortedByHand(nn.Module):
    """Sorts by length itself, packs, and undoes the order on the states or on the outputs."""

    def __init__(self, *, undo: str) -> None:
        super().__init__()
        self.undo = undo
        self.rnn = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x_BTI: Tensor, lengths_B: Tensor) -> Tensor:
        """Map (B, T, 4) and lengths to (B, 2)."""
        order = lengths_B.argsort(descending=True)
        packed = pack_padded_sequence(x_BTI[order], lengths_B[order].cpu(), batch_first=True)
        out, (h, _) = self.rnn(packed)
        if self.undo == "before the head":
            return self.head(h[-1][order.argsort()])
        if self.undo == "after the head":
            return self.head(h[-1])[order.argsort()]
        return self.head(pad_packed_sequence(out, batch_first=True)[0].sum(1)[order.argsort()])


class OfList(nn.Module):
    """``pack_sequence`` of a list with one tensor a sample."""

    def __init__(self, *, shuffled: bool = False, raw: bool = False) -> None:
        super().__init__()
        self.shuffled, self.raw = shuffled, raw
        self.before, self.rnn, self.head = nn.Linear(4, 4), nn.GRU(4, 5), nn.Linear(5, 2)

    def forward(self, x_BTI: Tensor, lengths_B: Tensor) -> Tensor:
        """Map (B, T, 4) and lengths to (B, 2)."""
        x_BTI = x_BTI if self.raw else self.before(x_BTI)
        parts = [x_BTI[b, :length] for b, length in enumerate(lengths_B.tolist())]
        if self.shuffled:
            parts = parts[::-1]
        packed = pack_sequence(parts, enforce_sorted=False)
        packed = packed._replace(data=self.before(packed.data)) if self.raw else packed
        h = self.head(self.rnn(packed)[1][-1])
        return h.flip(0) if self.shuffled else h


class PackedInput(nn.Module):
    """The model itself is given the packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 5, bidirectional=True), nn.Linear(10, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        """Map a packed batch to (B, 2)."""
        out, h = self.rnn(packed)
        return self.head(torch.cat([h[0], h[1]], 1)) + out.data.sum() * 0


class WithState(nn.Module):
    """Initial states that are parameters, or computed from the data."""

    def __init__(self, kind: Callable[..., nn.Module], *, learned: bool, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.rnn = kind(4, 5, num_layers=2, batch_first=True)
        self.states = 2 if isinstance(self.rnn, nn.LSTM) else 1
        if learned:
            self.h0 = nn.ParameterList(torch.randn(2, 1, 5) for _ in range(self.states))
        else:
            self.init = nn.Linear(3, 10 * self.states)
        self.learned = learned

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, features)."""
        size = x_BTI.shape[0]
        if self.learned:
            states = [h0.expand(-1, size, -1).contiguous() for h0 in self.h0]
        else:
            made = self.init(x_BTI[:, 0, :3]).tanh().view(size, self.states, 2, 5)
            states = [made[:, k].transpose(0, 1).contiguous() for k in range(self.states)]
        lengths = (x_BTI[:, 0, 0] > 0).long() * 2 + 2
        x = pack_padded_sequence(x_BTI, lengths.cpu(), batch_first=True, enforce_sorted=False) if self.packed else x_BTI
        out, ends = self.rnn(x, tuple(states) if self.states == 2 else states[0])
        out = out.data.sum() * 0 if self.packed else out.flatten(1)
        return out + (ends if self.states == 1 else torch.cat(ends)).transpose(0, 1).flatten(1).repeat(1, 7)[:, :20]


class Twice(nn.Module):
    """One LSTM on the sequence and on its reverse, and its biases used alone besides."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to itself."""
        once, state = self.rnn(x_BTI)
        return self.rnn(once.flip(1), state)[0]


class Folded(nn.Module):
    """An LSTM over each of several series of a sample, folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x_BKTI: Tensor) -> Tensor:
        """Map (B, K, T, 4) to (B, K·5)."""
        out, _ = self.rnn(x_BKTI.flatten(0, 1).tanh())
        return out[:, -1].unflatten(0, x_BKTI.shape[:2]).flatten(1)


class CellLoop(nn.Module):
    """Cells over time, one of them without a bias, states given or not."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(4, 5), nn.GRUCell(5, 4, bias=False)
        self.tanh, self.relu = nn.RNNCell(4, 4), nn.RNNCell(4, 5, nonlinearity="relu")

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, 5)."""
        state, g, h = None, None, torch.zeros(x_BTI.shape[0], 4, dtype=x_BTI.dtype, device=x_BTI.device)
        for t in range(x_BTI.shape[1]):
            state = self.lstm(x_BTI[:, t], state)
            g = self.gru(state[0], g)
            h = self.tanh(g, h)
        return self.relu(h) + state[1]


class CharModel(nn.Module):
    """A language model of characters."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.rnn = nn.LSTM(6, 6, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(6, 9)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to logits."""
        return self.head(self.rnn(self.emb(ids_BT))[0])


class SequenceToSequence(nn.Module):
    """Encoder, decoder and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(4, 5, batch_first=True, bidirectional=True)
        self.bridge, self.decoder = nn.Linear(10, 6), nn.GRUCell(10, 6)
        self.score, self.head = nn.Bilinear(6, 10, 1), nn.Linear(6, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, 3, 2)."""
        seen, h = self.encoder(x_BTI)
        state = self.bridge(torch.cat([h[0], h[1]], 1)).tanh()
        outputs = []
        for _ in range(3):
            asked = state.unsqueeze(1).expand(-1, seen.shape[1], -1).contiguous()
            state = self.decoder((self.score(asked, seen).softmax(1) * seen).sum(1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


class First(nn.Module):
    """The first of what a module before it returns: makes recurrent modules fit into ``nn.Sequential``."""

    def forward(self, found: tuple[Tensor, object]) -> Tensor:
        """Return the outputs and drop the states."""
        return found[0]


class Changed(nn.Module):
    """Outputs changed in place right after the layer."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 2)."""
        out, _ = self.rnn(x_BTI)
        out += 1
        return self.head(out)


class Checkpointed(nn.Module):
    """An LSTM under activation checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp, self.rnn, self.head = nn.Linear(4, 4), nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 2)."""
        return self.head(checkpoint(lambda x: self.rnn(x)[0], self.inp(x_BTI), use_reentrant=self.reentrant))


class Partly(nn.Module):
    """An LSTM of which some parameters are frozen."""

    def __init__(self, *trained: str) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, batch_first=True)
        for name, parameter in self.rnn.named_parameters():
            parameter.requires_grad_(name in trained)
        self.head = nn.Linear(5, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 2)."""
        return self.head(self.rnn(x_BTI)[0])


class InEval(nn.Module):
    """An LSTM with dropout in eval mode inside a model in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, 2, dropout=0.5, batch_first=True)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 5)."""
        return self.rnn.eval()(x_BTI)[0]


def _plain(name: str, kind: Callable[..., nn.Module], *, tokens: int = 5, random: bool = False, **options) -> Case:
    tags = ("recurrent", "random", "without_cudnn") if random else ("recurrent",)
    return layer_case(name, lambda: Sequence(kind, **options), 3, tokens, 4, tags=tags)


def _packed(name: str, build: Callable[[], nn.Module], *, ids: bool = False, refused: str = "") -> Case:
    def batch() -> Batch:
        x = torch.randint(0, 7, (4, 6)) if ids else torch.randn(4, 6, 4)
        return {"x": x, "lengths": torch.tensor(_LENGTHS)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        # Cut to the longest, as a collate function does: pad_packed_sequence of one sample would be shorter.
        return probe_loss(model(batch["x"], batch["lengths"]))

    return Case(name, build, batch, loss, tags=frozenset({"recurrent"}), refused=refused)


def _given_packed(model: nn.Module, batch: Batch) -> Tensor:
    packed = pack_padded_sequence(batch["x"], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False)
    return probe_loss(model(packed))


def _language(name: str, *, tied: bool = False) -> Case:
    return Case(
        name,
        lambda: CharModel(tied=tied),
        lambda: {"ids": torch.randint(0, 9, (4, 4))},
        lambda model, batch: next_token_loss(model(batch["ids"]), batch["ids"]),
        # One sample's mask is not the batch's: the reference runs the whole batch.
        reference="batched_graph",
        tags=frozenset({"recurrent", "random", "without_cudnn"}),
    )


def _of(name: str, build: Callable[[], nn.Module], *shape: int, tags: tuple[str, ...] = ()) -> Case:
    return layer_case(name, build, *(shape or (4, 4, 4)), tags=("recurrent", *tags))


# One dtype is enough for most: what differs in float32 is seen in `attention.py`'s and these.
_BOTH_DTYPES = {"packed_lstm_rows", "gru_two_layers_both_ways", "lstm_projected_both_ways", "char_lstm_tied"}

_ALL = [
    _plain("lstm_projected_both_ways", nn.LSTM, proj_size=2, num_layers=2, bidirectional=True),
    _plain("lstm_projected_no_bias", nn.LSTM, proj_size=3, bias=False, batch_first=True),
    _plain("gru_two_layers_both_ways", nn.GRU, num_layers=2, bidirectional=True, batch_first=True),
    _plain("gru_axes_swapped_square", nn.GRU, tokens=3),
    _plain("rnn_tanh_two_layers_no_bias", nn.RNN, num_layers=2, bias=False, tokens=3, batch_first=True),
    _plain("lstm_one_step", nn.LSTM, tokens=1, bidirectional=True, batch_first=True),
    _packed("packed_lstm_rows", lambda: PackedRows(nn.LSTM, batch_first=True)),
    _packed("packed_gru_both_ways", lambda: PackedRows(nn.GRU, bidirectional=True, num_layers=2)),
    _packed("packed_rnn_embedded", lambda: PackedRows(nn.RNN, embedded=True, batch_first=True), ids=True),
    _packed("packed_embedded_batch_second", lambda: PackedRows(nn.LSTM, embedded=True), ids=True),
    _packed("packed_sorted_undone_before_head", lambda: SortedByHand(undo="before the head")),
    _packed("packed_sorted_undone_after_head", lambda: SortedByHand(undo="after the head")),
    _packed("packed_sorted_undone_on_padded", lambda: SortedByHand(undo="on the outputs")),
    _packed("packed_list", OfList),
    _packed("packed_list_backwards", lambda: OfList(shuffled=True), refused="depends on other samples|another order"),
    _packed("packed_list_of_data", lambda: OfList(raw=True)),
    _packed(
        "packed_list_of_data_backwards",
        lambda: OfList(shuffled=True, raw=True),
        refused="depends on other samples|another order",
    ),
    Case(
        "packed_input",
        PackedInput,
        lambda: {"x": torch.randn(4, 6, 4), "lengths": torch.tensor(_LENGTHS)},
        _given_packed,
        tags=frozenset({"recurrent"}),
    ),
    _of("lstm_learned_states", lambda: WithState(nn.LSTM, learned=True)),
    _of("gru_learned_states_packed", lambda: WithState(nn.GRU, learned=True, packed=True)),
    _of("lstm_states_from_data", lambda: WithState(nn.LSTM, learned=False)),
    _of("gru_states_from_data_packed", lambda: WithState(nn.GRU, learned=False, packed=True)),
    _of("lstm_twice", Twice),
    _of("lstm_folded", Folded, 3, 2, 5, 4),
    _of("cells_of_all_kinds", CellLoop, 4, 3, 4),
    _language("char_lstm_dropout"),
    _language("char_lstm_tied", tied=True),
    _of("sequence_to_sequence", SequenceToSequence, 3, 5, 4),
    _of("recurrent_in_sequential", lambda: nn.Sequential(nn.LSTM(4, 5, batch_first=True), First(), nn.Linear(5, 2))),
    _of("lstm_checkpointed", lambda: Checkpointed(reentrant=False), 3, 5, 4, tags=("checkpoint",)),
    _of("lstm_checkpointed_reentrant", lambda: Checkpointed(reentrant=True), 3, 5, 4, tags=("checkpoint", "reentrant")),
    _of("lstm_state_weight_only", lambda: Partly("weight_hh_l0")),
    _of("lstm_biases_only", lambda: Partly("bias_ih_l0", "bias_hh_l0")),
    _of("lstm_in_eval_mode", InEval, tags=("without_cudnn",)),
    _of("rnn_changed_in_place", lambda: Changed(nn.RNN), tags=("without_cudnn",)),
    _of("gru_changed_in_place", lambda: Changed(nn.GRU), tags=("without_cudnn",)),
]

CASES = [case if case.name in _BOTH_DTYPES else replace(case, dtypes=(torch.float64,)) for case in _ALL]
