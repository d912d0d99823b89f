"""Entries of a parameter picked by data or by constants: brackets, gather, take, masks, relative positions."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.cases.custom_operations import OneParameter, Owner
from tests.cases.table import Case, ids_case, layer_case


class Looked(nn.Module):
    """A parameter that ids of the batch pick from, mixed with a table of their own."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.p = nn.Parameter(torch.randn(shape))
        self.use = use

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to (B, ...)."""
        found = self.use(self.p, ids_BT)
        return found.flatten(1).cumsum(1) * self.table(ids_BT).mean((1, 2), keepdim=True).flatten(1)


class WindowBias(nn.Module):
    """Scores with a relative position bias as in Swin: a table, a constant index, one bias a head."""

    def __init__(self, side: int = 3, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.tokens = heads, side * side
        self.qk = nn.Linear(6, 12)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        relative = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer("index", relative[..., 0] * (2 * side - 1) + relative[..., 1])

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 6) to (B, T, 6)."""
        q, k = self.qk(x_BTI).unflatten(2, (2, self.heads, 3)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(self.tokens, self.tokens, -1).permute(2, 0, 1)
        scores = torch.softmax(q @ k.transpose(2, 3) + bias.unsqueeze(0), -1)
        return (scores @ q).transpose(1, 2).flatten(2)


_BY_DATA: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "brackets": ((11, 4), lambda p, ids: p[ids]),
    "brackets_vector": ((11,), lambda p, ids: p[ids]),
    "brackets_cube": ((11, 2, 3), lambda p, ids: p[ids]),
    "brackets_second_axis": ((4, 11), lambda p, ids: p[:, ids].movedim(0, -1)),
    "brackets_negative": ((12, 4), lambda p, ids: p[ids - 11]),
    "brackets_pair": ((11, 11, 3), lambda p, ids: p[ids, ids.flip(1)]),
    "brackets_pair_constant": ((11, 4), lambda p, ids: p[ids, torch.arange(4)]),
    "brackets_then_view": ((4, 11), lambda p, ids: p.t()[ids]),
    "embedding_of_slice": ((13, 8), lambda p, ids: nn.functional.embedding(ids, p[2:, :4])),
    "index_select": ((11, 4), lambda p, ids: p.index_select(0, ids[:, 0])),
    "index_select_second": ((4, 11), lambda p, ids: torch.index_select(p, 1, ids[:, 0]).t()),
    "gather": ((11, 4), lambda p, ids: torch.gather(p, 0, ids)),
    "take": ((3, 4), torch.take),
    "gather_expanded": ((1, 11), lambda p, ids: p.expand(ids.shape[0], 11).gather(1, ids)),
}
_BY_CONSTANT: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "arange": ((3, 5), lambda p, x: x + p[torch.arange(3)]),
    "repeated": ((7, 5), lambda p, x: x + p[torch.tensor([0, 2, 2])]),
    "numbers": ((7,), lambda p, x: x + p[torch.tensor([0, 2, 2])][:, None]),
    "index_select": ((5, 7), lambda p, x: x + p.index_select(1, torch.tensor([0, 2, 2], device=p.device)).t()),
    "gather": ((7, 5), lambda p, x: x + p.gather(0, torch.tensor([[0, 1, 2, 3, 3]] * 3, device=p.device))),
    "take": ((7, 5), lambda p, x: x + p.take(torch.tensor([1, 8, 30], device=p.device))[:, None]),
    "mask": ((3, 5), lambda p, x: x + p[torch.tensor([True, False, True])].sum(0)),
    "identity": ((3, 3), lambda p, x: (torch.eye(3).to(p) * p) @ x),
    "pair": ((3, 5), lambda p, x: x + p[torch.arange(3), torch.tensor([4, 2, 2])][:, None]),
}


def _by_data(name: str, samples: int, suffix: str = "") -> Case:
    shape, use = _BY_DATA[name]
    return ids_case(f"picked_{name}{suffix}", lambda: Looked(shape, use), samples, 4)


def _by_constant(name: str, samples: int, model: type[nn.Module], suffix: str) -> Case:
    shape, use = _BY_CONSTANT[name]
    case = layer_case(f"constant_{name}{suffix}", lambda: model(shape, use), samples, 3, 5)
    # How constants are told from data is the same in every dtype.
    return replace(case, dtypes=(torch.float64,))


CASES = [
    *(_by_data(name, 3) for name in _BY_DATA),
    *(_by_data(name, 4, "_samples_equal_tokens") for name in ("brackets", "brackets_cube", "gather", "take")),
    _by_data("brackets", 1, "_one_sample"),
    *(_by_constant(name, 4, OneParameter, "") for name in _BY_CONSTANT),
    *(_by_constant(name, 3, OneParameter, "_samples_equal_entries") for name in _BY_CONSTANT),
    *(_by_constant(name, 3, Owner, "_alone_samples_equal_entries") for name in _BY_CONSTANT),
    layer_case("constant_window_bias", WindowBias, 4, 9, 6),
    layer_case("constant_window_bias_equal_samples", WindowBias, 9, 9, 6),
    layer_case("constant_window_bias_dividing_samples", WindowBias, 3, 9, 6),
]
