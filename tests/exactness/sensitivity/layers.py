"""The kinds of layers that the search tries: tiny models whose inputs and output gradients are the data themselves.

Shape letters: B samples, T positions, I inputs, O outputs, V rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Data = Mapping[str, Tensor]
Run: TypeAlias = Callable[[Any, Data], "Tensor | tuple[Tensor, ...]"]

# Rows of every table.
ROWS = 24


class Model(nn.Module):
    """Named layers and parameters, and the function that applies them."""

    def __init__(self, owned: Mapping[str, nn.Module | nn.Parameter], run: Run) -> None:
        """Keep them."""
        super().__init__()
        for name, part in owned.items():
            setattr(self, name, part)
        self._run = run

    def forward(self, data: Data) -> tuple[Tensor, ...]:
        """Return the outputs, samples along the first axis."""
        outputs = self._run(self, data)
        return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True)
class Kind:
    """One way of using parameters.

    Attributes:
        name: What it is called.
        make: From a width to layers and parameters.
        run: From the model and its data to one output or several.
        values: Features of each position of every input, from a width, by the input's name.
        ids: Names of inputs that are row numbers.
        widths: The widths that are tried: small ones are formed whole, large ones as Gram sums.
        positions: The numbers of positions that are tried.
        again: Whether the model is called a second time in the same backward, with "y" in the place of "x".
        computed: Whether activations pass through other products before they are a layer's input, so that a batch of
            another size may round them otherwise.
    """

    name: str
    make: Callable[[int], Mapping[str, nn.Module | nn.Parameter]]
    run: Run
    values: Callable[[int], Mapping[str, tuple[int, ...]]]
    ids: tuple[str, ...] = ()
    widths: tuple[int, ...] = (3, 48)
    positions: tuple[int, ...] = (1, 2, 3, 4, 6, 17, 64)
    again: bool = False
    computed: bool = False

    def model(self, width: int) -> Model:
        """Return a model with random weights."""
        return Model(self.make(width), self.run)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _x(width: int) -> Mapping[str, tuple[int, ...]]:
    return {"x": (width,)}


def _xy(width: int) -> Mapping[str, tuple[int, ...]]:
    return {"x": (width,), "y": (width,)}


def _nothing(width: int) -> Mapping[str, tuple[int, ...]]:
    return {}


def _each(layer: Callable[[Tensor], Tensor], x_BTI: Tensor) -> Tensor:
    return torch.stack([layer(x_BI) for x_BI in x_BTI.unbind(1)], 1)


def _channels(layer: nn.Module, x_BTI: Tensor) -> Tensor:
    return layer(x_BTI.transpose(1, 2)).transpose(1, 2)


def _image(layer: nn.Module, x_BTI: Tensor) -> Tensor:
    # Positions along one side of a picture three pixels high.
    x_BCHW = x_BTI.transpose(1, 2).unsqueeze(2).expand(-1, -1, 3, -1)
    return layer(x_BCHW).flatten(2).transpose(1, 2)


def _bag(model: Model, data: Data, mode: str) -> Tensor:
    weights_BT = data["x"].squeeze(-1) if mode == "sum" else None
    bag_BI = functional.embedding_bag(data["ids"], model.table, mode=mode, per_sample_weights=weights_BT)
    return bag_BI.unsqueeze(1)


def _cells(model: Model, data: Data) -> Tensor:
    x_BTI = data["x"]
    state_BI = x_BTI[:, 0] * 0
    states = []
    for x_BI in x_BTI.unbind(1):
        state_BI = model.layer(x_BI, state_BI)
        states.append(state_BI)
    return torch.stack(states, 1)


def _addmm(model: Model, data: Data) -> Tensor:
    x_BTI = data["x"]
    flat = torch.addmm(model.bias, x_BTI.reshape(-1, x_BTI.shape[-1]), model.weight)
    return flat.view(*x_BTI.shape[:-1], -1)


def _with_token(model: Model, data: Data) -> Tensor:
    x_BTI = data["x"]
    return torch.cat([model.token.expand(len(x_BTI), -1, -1), x_BTI], 1)


def _attention(model: Model, data: Data) -> Tensor:
    return model.layer(data["x"], data["x"], data["x"], need_weights=False)[0]


def _table(width: int) -> Mapping[str, nn.Parameter]:
    return {"table": _parameter(ROWS, width)}


def _linear(width: int) -> Mapping[str, nn.Module]:
    return {"layer": nn.Linear(width, width, bias=False)}


def _lookup(ids_BT: Tensor, table: Tensor) -> Tensor:
    return functional.embedding(ids_BT, table)


def _heads(width: int) -> int:
    return 2 if width % 2 == 0 else 1


_FEW = (1, 2, 3, 5)
_CHANNELS = (4, 32)

KINDS: tuple[Kind, ...] = (
    Kind("linear", _linear, lambda m, d: m.layer(d["x"]), _x, positions=(1, 2, 3, 4, 6, 17, 64, 512)),
    Kind("linear, long rows", lambda w: {"layer": nn.Linear(w, 2, bias=False)}, lambda m, d: m.layer(d["x"]), _x,
         widths=(300, 4096), positions=(1, 2, 3)),
    Kind("linear, long inputs", lambda w: {"layer": nn.Linear(w, 64, bias=False)}, lambda m, d: m.layer(d["x"]), _x,
         widths=(1024, 4096), positions=(2, 4, 12)),
    Kind("linear, wide", _linear, lambda m, d: m.layer(d["x"]), _x, widths=(128, 300), positions=(8, 32, 60)),
    Kind("linear with bias", lambda w: {"layer": nn.Linear(w, w)}, lambda m, d: m.layer(d["x"]), _x),
    Kind("linear, a call for each position", _linear, lambda m, d: _each(m.layer, d["x"]), _x, positions=_FEW),
    Kind("linear, two calls", _linear, lambda m, d: (m.layer(d["x"]), m.layer(d["y"])), _xy),
    Kind("linear, two forwards", _linear, lambda m, d: m.layer(d["x"]), _xy, again=True),
    Kind("weight and its transpose", lambda w: {"weight": _parameter(w, w)},
         lambda m, d: (d["x"] @ m.weight, d["y"] @ m.weight.t()), _xy),
    Kind("embedding", lambda w: {"layer": nn.Embedding(ROWS, w)}, lambda m, d: m.layer(d["ids"]), _nothing,
         ids=("ids",), positions=(1, 2, 3, 4, 6, 17, 64, 512)),
    Kind("embedding times a weight", lambda w: {"layer": nn.Embedding(ROWS, w)},
         lambda m, d: m.layer(d["ids"]) * d["x"], lambda w: {"x": (1,)}, ids=("ids",)),
    Kind("embedding, two calls", lambda w: {"layer": nn.Embedding(ROWS, w)},
         lambda m, d: (m.layer(d["ids"]), m.layer(d["others"])), _nothing, ids=("ids", "others")),
    Kind("embedding, a call for each position", lambda w: {"layer": nn.Embedding(ROWS, w)},
         lambda m, d: _each(m.layer, d["ids"]), _nothing, ids=("ids",), positions=_FEW),
    Kind("bag, sum", _table, lambda m, d: _bag(m, d, "sum"), lambda w: {"x": (1,)}, ids=("ids",)),
    Kind("bag, mean", _table, lambda m, d: _bag(m, d, "mean"), _nothing, ids=("ids",)),
    Kind("indexed rows", _table, lambda m, d: m.table[d["ids"]] * d["x"], lambda w: {"x": (1,)}, ids=("ids",)),
    Kind("embedding and head, tied", _table,
         lambda m, d: (_lookup(d["ids"], m.table), functional.linear(d["x"], m.table)), _x, ids=("ids",)),
    Kind("language model, tied", _table, lambda m, d: functional.linear(_lookup(d["ids"], m.table) + d["x"], m.table),
         _x, ids=("ids",), computed=True),
    Kind("layer norm", lambda w: {"layer": nn.LayerNorm(w)}, lambda m, d: m.layer(d["x"]), _x),
    Kind("RMS norm", lambda w: {"layer": nn.RMSNorm(w)}, lambda m, d: m.layer(d["x"]), _x),
    Kind("group norm", lambda w: {"layer": nn.GroupNorm(2, w)}, lambda m, d: _channels(m.layer, d["x"]), _x,
         widths=_CHANNELS, positions=(2, 3, 4, 6, 17, 64)),
    Kind("scale", lambda w: {"scale": _parameter(w)}, lambda m, d: d["x"] * m.scale, _x),
    Kind("transposed weight, entry by entry, for each position", lambda w: {"weight": _parameter(w, w + 1)},
         lambda m, d: _each(lambda x_BI: x_BI.unsqueeze(1) * m.weight.t(), d["x"]), _x, widths=(3, 16),
         positions=_FEW),
    Kind("shift", lambda w: {"shift": _parameter(w)}, lambda m, d: d["x"] + m.shift, _x),
    Kind("scale of the whole", lambda w: {"scale": _parameter(1)}, lambda m, d: d["x"] * m.scale, _x),
    Kind("PReLU", lambda w: {"layer": nn.PReLU()}, lambda m, d: m.layer(d["x"]), _x),
    Kind("convolution 1d", lambda w: {"layer": nn.Conv1d(w, w, 2, padding=1)},
         lambda m, d: _channels(m.layer, d["x"]), _x, widths=_CHANNELS),
    Kind("convolution 1d, grouped, strided",
         lambda w: {"layer": nn.Conv1d(w, w, 3, stride=2, padding=1, groups=2, bias=False)},
         lambda m, d: _channels(m.layer, d["x"]), _x, widths=_CHANNELS),
    Kind("convolution 1d, two calls", lambda w: {"layer": nn.Conv1d(w, w, 2, padding=1, bias=False)},
         lambda m, d: (_channels(m.layer, d["x"]), _channels(m.layer, d["y"])), _xy, widths=_CHANNELS),
    Kind("convolution 2d", lambda w: {"layer": nn.Conv2d(w, w, 3, padding=1)}, lambda m, d: _image(m.layer, d["x"]),
         _x, widths=_CHANNELS, positions=_FEW),
    Kind("recurrent layer", lambda w: {"layer": nn.RNN(w, w, batch_first=True)}, lambda m, d: m.layer(d["x"])[0], _x,
         widths=(3, 16), positions=_FEW, computed=True),
    Kind("LSTM", lambda w: {"layer": nn.LSTM(w, w, batch_first=True)}, lambda m, d: m.layer(d["x"])[0], _x,
         widths=(3, 16), positions=_FEW, computed=True),
    Kind("GRU", lambda w: {"layer": nn.GRU(w, w, batch_first=True)}, lambda m, d: m.layer(d["x"])[0], _x,
         widths=(3, 16), positions=_FEW, computed=True),
    Kind("recurrent cell", lambda w: {"layer": nn.RNNCell(w, w)}, _cells, _x, widths=(3, 16), positions=_FEW,
         computed=True),
    Kind("attention", lambda w: {"layer": nn.MultiheadAttention(w, _heads(w), batch_first=True)}, _attention, _x,
         widths=(4, 16), positions=(1, 2, 3, 6, 17), computed=True),
    Kind("addmm", lambda w: {"weight": _parameter(w, w), "bias": _parameter(w)}, _addmm, _x),
    Kind("einsum", lambda w: {"weight": _parameter(w, w)}, lambda m, d: torch.einsum("bti,io->bto", d["x"], m.weight),
         _x),
    Kind("einsum over heads", lambda w: {"weight": _parameter(2, w, w)},
         lambda m, d: torch.einsum("bti,hoi->btho", d["x"], m.weight), _x, widths=(3, 24)),
    Kind("weight derived from two", lambda w: {"weight": _parameter(w, w), "scale": _parameter(w)},
         lambda m, d: functional.linear(d["x"], m.weight * m.scale.unsqueeze(1)), _x, widths=(3, 24)),
    Kind("operation without a rule", lambda w: {"weight": _parameter(w)}, lambda m, d: torch.atan2(d["x"], m.weight),
         _x, computed=True),
    Kind("token for each sample", lambda w: {"token": _parameter(1, 1, w)}, _with_token, _x),
    Kind("bilinear", lambda w: {"layer": nn.Bilinear(w, w, 2)}, lambda m, d: m.layer(d["x"], d["y"]), _xy,
         widths=(3, 12)),
    Kind("convolution 1d, transposed", lambda w: {"layer": nn.ConvTranspose1d(w, w, 2, stride=2)},
         lambda m, d: _channels(m.layer, d["x"]), _x, widths=_CHANNELS),
    Kind("experts, stacked", lambda w: {"stack": _parameter(2, w, w)},
         lambda m, d: (d["x"] @ m.stack[0], d["y"] @ m.stack[1], d["y"] @ m.stack[0]), _xy),
    Kind("slices of a projection", lambda w: {"weight": _parameter(3 * w, w)},
         lambda m, d: (functional.linear(d["x"], m.weight[: d["x"].shape[-1]]),
                       functional.linear(d["x"], m.weight[d["x"].shape[-1] :])),
         _x, widths=(3, 32)),
    Kind("slices that overlap", lambda w: {"weight": _parameter(2 * w, w)},
         lambda m, d: (functional.linear(d["x"], m.weight[: d["x"].shape[-1]]), functional.linear(d["y"], m.weight)),
         _xy, widths=(3, 32)),
    Kind("low-rank sum",
         lambda w: {"base": nn.Linear(w, w), "down": nn.Linear(w, 2, bias=False), "up": nn.Linear(2, w, bias=False)},
         lambda m, d: m.base(d["x"]) + m.up(m.down(d["x"])), _x, computed=True),
    Kind("product and element-wise", lambda w: {"weight": _parameter(w)},
         lambda m, d: ((d["x"] @ m.weight).unsqueeze(-1), d["y"] * m.weight), _xy),
    Kind("matrix, product and element-wise", lambda w: {"weight": _parameter(w, w)},
         lambda m, d: (d["x"] @ m.weight, d["z"] * m.weight), lambda w: {"x": (w,), "z": (w, w)}, widths=(3, 24),
         positions=_FEW),
    Kind("rows and element-wise", _table, lambda m, d: (_lookup(d["ids"], m.table), d["z"] * m.table),
         lambda w: {"z": (ROWS, w)}, ids=("ids",), positions=_FEW),
    Kind("rows, bag and head, tied", _table,
         lambda m, d: (_lookup(d["ids"], m.table), m.table[d["others"]], functional.linear(d["x"], m.table)), _x,
         ids=("ids", "others")),
    Kind("several parameters",
         lambda w: {"layer": nn.Linear(w, w), "table": _parameter(ROWS, w), "scale": _parameter(w)},
         lambda m, d: (m.layer(d["x"]), _lookup(d["ids"], m.table), d["x"] * m.scale), _x, ids=("ids",)),
)  # fmt: skip


def kind(name: str) -> Kind:
    """Return the kind of that name."""
    return next(found for found in KINDS if found.name == name)
