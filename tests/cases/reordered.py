"""Models that put their batch into another order before a parameter meets it, and undo it at the end."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tests.cases.table import Batch, Case, on_x, probe_loss

Order = Callable[[Tensor], tuple[Tensor, Tensor]]
Loss = Callable[[nn.Module, Batch], Tensor]


def _by_content(x: Tensor) -> Tensor:
    return x.flatten(1).float().sum(1).argsort(descending=True)


def _indexed(x: Tensor) -> tuple[Tensor, Tensor]:
    order = _by_content(x)
    return x[order], order.argsort()


def _listed(x: Tensor) -> tuple[Tensor, Tensor]:
    order = _by_content(x)
    return x[order.tolist()], order.argsort()


def _selected(x: Tensor) -> tuple[Tensor, Tensor]:
    order = _by_content(x)
    return x.index_select(0, order).clone(), order.argsort()


def _flipped(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.flip(x, (0,)), torch.arange(len(x), device=x.device).flip(0)


def _rolled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.roll(1, 0), torch.arange(len(x), device=x.device).roll(1).argsort()


def _parted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split by content, as a batch of two kinds of rows is."""
    kind = x.flatten(1).float().mean(1) > x.float().mean()
    number = torch.arange(len(x), device=x.device)
    return torch.cat([x[kind], x[~kind]]), torch.cat([number[kind], number[~kind]]).argsort()


class _Sorting(nn.Module):
    """Any layers between a reordering and its undoing."""

    def __init__(self, order: Order, first: nn.Module) -> None:
        super().__init__()
        self.order, self.first = order, first
        self.middle, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x, undo = self.order(x)
        h = self.middle(self.first(x)).tanh() * self.shift
        return self.head(h.mean(1)[undo])


class _InPieces(nn.Module):
    """Any layers on pieces of the batch, or on each of its rows by itself, as code that saves memory is written."""

    def __init__(self, pieces: Callable[[Tensor], Sequence[Tensor]], first: nn.Module) -> None:
        super().__init__()
        self.pieces, self.first = pieces, first
        self.middle, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.middle(self.first(piece)).tanh() * self.shift for piece in self.pieces(x)]
        return self.head(torch.cat([part.view(-1, *part.shape[-2:]) for part in parts]).mean(1))


class _Chosen(nn.Module):
    """Only some rows pass through the layers: those of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        chosen = ids[:, 0] > 4
        h = self.head(self.embedding(ids[chosen])).mean(1)
        return h.new_zeros(len(ids), 3).index_put((chosen.nonzero()[:, 0],), h)


def _ids(name: str, order: Order) -> Case:
    def build() -> nn.Module:
        return _Sorting(order, nn.Embedding(11, 6))

    return Case(f"reordered_ids_{name}", build, lambda: {"x": torch.randint(11, (5, 4))}, on_x)


def _features(name: str, order: Order) -> Case:
    def build() -> nn.Module:
        return _Sorting(order, nn.Linear(4, 6))

    return Case(f"reordered_features_{name}", build, lambda: {"x": torch.randn(5, 5, 4)}, on_x)


_ORDERS: dict[str, Order] = {
    "indexed": _indexed, "listed": _listed, "selected": _selected, "flipped": _flipped, "rolled": _rolled,
    "parted": _parted,
}  # fmt: skip

_PIECES: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "split": lambda x: x.split(2),
    "sizes": lambda x: torch.split(x, [1, len(x) - 1], dim=0),
    "chunk": lambda x: x.chunk(3),
    "tensor_split": lambda x: x.tensor_split(2),
    "narrow": lambda x: [torch.narrow(x, 0, 0, 1), x.narrow(0, 1, len(x) - 1)],
    "axis_from_behind": lambda x: [
        part for half in x.narrow(-x.dim(), 0, len(x)).chunk(2, dim=-x.dim()) for part in half.split(2, -x.dim())
    ],
    "rows": lambda x: [*x],
    "rows_with_an_axis": lambda x: [row.unsqueeze(0) for row in x.unbind()],
    "of_pieces": lambda x: [part for half in x.chunk(2) for part in half.split(1)],
}


def _of_both(kind: str, name: str, model: Callable[[nn.Module], nn.Module], loss: Loss = on_x) -> list[Case]:
    """Return the cases of a model behind a table and behind a layer."""

    def of_ids() -> nn.Module:
        return model(nn.Embedding(11, 6))

    def of_features() -> nn.Module:
        return model(nn.Linear(4, 6))

    return [
        Case(f"{kind}_of_ids_{name}", of_ids, lambda: {"x": torch.randint(11, (5, 4))}, loss),
        Case(f"{kind}_of_features_{name}", of_features, lambda: {"x": torch.randn(5, 3, 4)}, loss),
    ]


class _TwoViews(nn.Module):
    """Both views of every sample in one pass, as siamese networks and their predictors have them."""

    def __init__(self, apart: Callable[[Tensor], Sequence[Tensor]] | None, first: nn.Module) -> None:
        super().__init__()
        self.apart, self.first = apart, first
        self.encoder, self.predictor = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.first(torch.cat([x, x.flip(1)]))).tanh()
        if self.apart is None:
            return self.predictor(h.mean(1))
        one, other = self.apart(h.mean(1))
        return self.predictor(one) * other[:, :3] + one[:, :3]


_APART: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunk": lambda h: h.chunk(2),
    "slices": lambda h: (h[: len(h) // 2], h[len(h) // 2 :]),
    "view": lambda h: h.view(2, -1, h.shape[1]).unbind(),
}


def _of_flat_views(model: nn.Module, batch: Batch) -> Tensor:
    one, other = model(batch["x"]).chunk(2)
    return probe_loss(one * other + one)


class _ViewsInSequences(nn.Module):
    """Both views along the second axis, where sequences come first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.transpose(0, 1)
        one, other = self.encoder(torch.cat([steps, steps.flip(0)], 1))[0][-1].chunk(2)
        return self.head(one * other)


class _ByThemselves(nn.Module):
    """Each sample goes through the layers by itself, as long as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(x)
        parts = [self.norm(h[place, :length]) * self.scale for place, length in enumerate(lengths.tolist())]
        return self.head(torch.stack([part.tanh().mean(0) for part in parts]))


class _Windows(nn.Module):
    """Halves of each sequence are folded into the batch before the samples, and parted again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.mix = nn.Linear(4, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.first(x).view(len(x), 2, -1, 6).transpose(0, 1).flatten(0, 1)
        halves = (self.mix(halves) * self.scale).tanh()
        return self.head(halves.view(2, len(x), -1, 6).transpose(0, 1).flatten(1, 2).cumsum(1)[:, -1])


def _in_place(x: Tensor, mask: Tensor, layer: nn.Module) -> Tensor:
    x = x.clone()
    x[mask] = x[mask] + layer(x[mask]).tanh()
    return x


def _into_zeros(x: Tensor, mask: Tensor, layer: nn.Module) -> Tensor:
    shift = torch.zeros_like(x)
    shift[mask] = layer(x[mask]).tanh()
    return x + shift


def _added(x: Tensor, mask: Tensor, layer: nn.Module) -> Tensor:
    index = mask.nonzero().squeeze(1)
    return x.index_add(0, index, layer(x[index]).tanh())


_WRITTEN = {"in_place": _in_place, "into_zeros": _into_zeros, "added": _added}


class _Gated(nn.Module):
    """Layers in a row, each on the samples that a mask of its own selects, from the raw input on."""

    def __init__(self, write: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)
        self.write = write

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        for layer, mask in zip(self.layers, gates.unbind(1), strict=True):
            x = self.write(x, mask, layer)
        return self.head(x)


def _gated(name: str, write: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> Case:
    gates = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 1, 1], [0, 1, 0], [0, 0, 1]]).bool()
    return Case(
        f"gated_samples_{name}",
        partial(_Gated, write),
        lambda: {"x": torch.randn(5, 4), "gates": gates},
        lambda model, batch: probe_loss(model(batch["x"], batch["gates"])),
    )


class _OnData(nn.Module):
    """What a parameter makes of data alone is taken apart, put into another order and put back."""

    def __init__(self, first: Callable[["_OnData", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.p, self.inner = first, nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)
        self.parts, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self, x)
        x = x + torch.cat([self.parts(part) for part in x.chunk(2)]).tanh()
        order = x.flatten(1).sum(1).argsort()
        return self.head(x[order])[order.argsort()]

    def positions(self, x: Tensor) -> Tensor:
        return x + self.p

    def token(self, x: Tensor) -> Tensor:
        return torch.cat([self.p[None, :1].expand(len(x), -1, -1), x], 1)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.p[:1].repeat(len(x), 1)[:, None]

    def scattered(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return x + torch.zeros_like(h).scatter_add(1, h.sum(-1, keepdim=True).argsort(1).expand_as(h), h.tanh())

    def folded(self, x: Tensor) -> Tensor:
        return x + self.inner(x.reshape(-1, 4)).view(x.shape)

    def folded_turned(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(0, 1).reshape(-1, 4)).view(-1, len(x), 4).transpose(0, 1)

    def routed(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        hit = self.inner(flat).sum(1) > 0
        out = torch.zeros_like(flat)
        for layer, mask in ((self.parts, hit), (self.inner, ~hit)):
            index = mask.nonzero().squeeze(-1)
            out = out.index_add(0, index, layer(flat[index]) * self.p[:1])
        return x + out.view(x.shape)


_ON_DATA = {
    name: getattr(_OnData, name)
    for name in ("positions", "token", "scaled", "scattered", "folded", "folded_turned", "routed")
}


class _Cells(nn.Module):
    """A batch sorted by length, of which each step runs the sequences that are not over, from a state of zeros."""

    def __init__(self, first: nn.Module, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.first, self.cell, self.head = first, cell(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        h, states = self.first(x[order]), None
        for step in range(int(lengths.max())):
            size = int((lengths > step).sum())
            old = states if states is None else tuple(state[:size] for state in states)
            new = self.cell(h[:size, step], old[0] if old is not None and type(self.cell) is nn.GRUCell else old)
            states = self._joined(new if isinstance(new, tuple) else (new,), states, size)
        return self.head(states[0].index_select(0, order.argsort()))

    @staticmethod
    def _joined(new: tuple[Tensor, ...], old: tuple[Tensor, ...] | None, size: int) -> tuple[Tensor, ...]:
        if old is None:
            old = tuple(torch.zeros_like(state) for state in new)
        return tuple(torch.cat([begun, over[size:]]) for begun, over in zip(new, old, strict=True))


def _cells(name: str, first: Callable[[], nn.Module], cell: type[nn.RNNCellBase]) -> Case:
    def batch() -> dict[str, Tensor]:
        x = torch.randint(11, (5, 4)) if name == "ids" else torch.randn(5, 4, 4)
        return {"x": x, "lengths": torch.tensor([2, 4, 1, 4, 3])}

    return Case(
        f"reordered_{name}_{cell.__name__}",
        lambda: _Cells(first(), cell),
        batch,
        lambda model, given: probe_loss(model(given["x"], given["lengths"])),
    )


CASES = [
    Case(
        "samples_by_themselves",
        _ByThemselves,
        lambda: {"x": torch.randn(5, 4, 4), "lengths": torch.tensor([2, 4, 1, 4, 3])},
        lambda model, batch: probe_loss(model(batch["x"], batch["lengths"])),
    ),
    Case("windows_before_samples", _Windows, lambda: {"x": torch.randn(5, 4, 4)}, on_x),
    Case("windows_before_two_samples", _Windows, lambda: {"x": torch.randn(2, 4, 4)}, on_x),
    *(_gated(name, write) for name, write in _WRITTEN.items()),
    *(
        Case(f"picked_of_data_{name}", partial(_OnData, first), lambda: {"x": torch.randn(5, 3, 4)}, on_x)
        for name, first in _ON_DATA.items()
    ),
    _cells("ids", lambda: nn.Embedding(11, 6), nn.GRUCell),
    _cells("ids", lambda: nn.Embedding(11, 6), nn.LSTMCell),
    _cells("features", lambda: nn.Linear(4, 6), nn.GRUCell),
    Case("views_in_sequences", _ViewsInSequences, lambda: {"x": torch.randn(5, 3, 4)}, on_x),
    *(case for name, apart in _APART.items() for case in _of_both("views", name, partial(_TwoViews, apart))),
    *_of_both("views", "flat", partial(_TwoViews, None), _of_flat_views),
    *(case for name, pieces in _PIECES.items() for case in _of_both("pieces", name, partial(_InPieces, pieces))),
    *(_ids(name, order) for name, order in _ORDERS.items()),
    *(_features(name, order) for name, order in _ORDERS.items()),
    Case("reordered_ids_some_rows_only", _Chosen, lambda: {"x": torch.randint(11, (6, 4))}, on_x),
]
