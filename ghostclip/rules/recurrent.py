"""Recurrent layers: LSTM, GRU and RNN, written out so that every parameter meets its data in a product.

A layer's weights meet data twice: ``W_ih`` the inputs of all steps, ``W_hh`` the states before all steps (``W_hr``, of
a projection, the states themselves). The first is an ordinary linear map. The second is recursive, but once the steps
have run, all states are known, and ``W_hh``'s gradient is that of a linear map on them. It is written as such: an
addend of zeros to the gates, whose gradient the time steps' own backward gives, and which a rule takes for the linear
map's output.

Dense sequences are ``(T, B, features)`` here whatever ``batch_first`` says; packed ones are the rows of all steps.

Shape letters: T steps, B sequences, N rows of all steps, L rows: (T, B) or (N), G·H gates, P features of a state.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from ghostclip.errors import DataError, UncoveredParameterError
from ghostclip.factors import Factor, Outer
from ghostclip.rules.product import position_sum
from ghostclip.rules.recurrent_cells import CELLS
from ghostclip.rules.recurrent_steps import KINDS, Kind, Steps, Weights
from ghostclip.rules.registry import Call, Captured, Split, register_op

_SETTINGS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_SETTINGS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_SETTINGS)


def recurrent_product(states: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Return zeros ``(*L, O)`` that stand for the product of known states with their weight, and await its gradient."""
    # The layer's result `rows`, (*L, ...), tells whose each row is. The zeros have no memory of their own.
    if has_torch_function((states, weight, bias, rows)):
        stand_in: Tensor = handle_torch_function(
            recurrent_product, (states, weight, bias, rows), states, weight, bias, rows
        )
        return stand_in
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        # Zeros do not depend on the weight: whoever calls this must see to its gradient, or it would be lost.
        message = "recurrent layer: its rows cannot be assigned to samples. Give it the whole batch, or freeze it."
        raise UncoveredParameterError(message)
    return states.new_zeros(()).expand(*states.shape[:-1], weight.shape[0])


@register_op("recurrent_product", arguments="states weight bias rows")
def _recurrent_product(call: Call) -> Captured | None:
    """Rule for the product with known states: weight ``Outer``, bias ``Dense``."""
    states, shape = call.values["states"], call.values["weight"].shape
    needs_weight, needs_bias, num_batch_dims = "weight" in call.tracked, "bias" in call.tracked, states.dim() - 1

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTO = split(grad, num_batch_dims)
        found: dict[str, Factor] = {}
        if needs_weight:
            found["weight"] = Outer(split(saved[0], num_batch_dims), g_BTO, shape=shape)
        if needs_bias:
            found["bias"] = position_sum(g_BTO)
        return found

    return Captured((states,) if needs_weight else (), call.values["rows"], num_batch_dims, factors, "outer product")


@dataclass(frozen=True)
class _Direction:
    """One direction of one layer: its kind, the rows of each step, and which weights it has."""

    kind: Kind
    steps: Steps
    bias: bool
    projected: bool

    def weights(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Weights:
        """Return weights (hh, bias or hr, ...) in the dtype of the steps."""
        given = iter(tensor.to(dtype) for tensor in tensors)
        hh = next(given)
        return Weights(hh, next(given) if self.bias else None, next(given) if self.projected else None)


class _Recurrence(torch.autograd.Function):
    """Time steps that have run already, as one node: its backward runs them backwards."""

    @staticmethod
    def forward(ctx: Any, direction: _Direction, ran: Sequence[Tensor], made: Sequence[Tensor], *entered: Any) -> Any:
        """Return the states of steps that ran before as a node of the graph."""
        # ran: what the backward reads, then the weights. made: states after all rows, then the last ones. entered:
        # gates, stand-ins of the products with states (or None), initial states.
        ctx.direction, ctx.dtypes = direction, [None if tensor is None else tensor.dtype for tensor in entered]
        ctx.kept = len(ran) - 1 - direction.bias - direction.projected
        ctx.shapes = [tensor.shape for tensor in made]
        # Read where a backward's memory is estimated.
        ctx.workspace = ran[0].nbytes // direction.kind.gates * direction.kind.beside
        ctx.save_for_backward(*ran)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the steps backwards."""
        direction, saved = ctx.direction, ctx.saved_tensors
        kept = saved[: ctx.kept]
        like = kept[0]
        with _plainly(like):
            given = [
                like.new_zeros(shape) if grad is None else grad.to(like.dtype).contiguous()
                for grad, shape in zip(grads, ctx.shapes, strict=True)
            ]
            weights = direction.weights(saved[ctx.kept :], like.dtype)
            found = direction.kind.backward(kept, given[0], given[1:], weights, direction.steps)
        back = (found.gates_NG, found.hidden_NG, found.projected_NP, *found.firsts)
        wanted = zip(back, ctx.dtypes, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(g.to(dtype) if needs and g is not None else None for g, dtype, needs in wanted)


def _plainly(like: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(like.device.type, enabled=False)


def _run(
    direction: _Direction, x: Tensor, firsts: Sequence[Tensor], weights: Mapping[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """Run one direction of one layer; return states after all rows, ``(*L, P)``, and the last ones."""
    gates = functional.linear(x, _given(weights["ih"]), weights["b_ih"])
    firsts = [_entered(first, gates, direction.steps.sizes[0]) for first in firsts]
    if direction.kind is KINDS["gru"]:
        gates = gates.to(torch.promote_types(gates.dtype, firsts[0].dtype))
    lead, dtype = gates.shape[:-1], gates.dtype
    plain = [tensor.detach() for name in ("hh", "b_hh", "hr") if (tensor := weights[name]) is not None]
    with torch.no_grad(), _plainly(gates):
        # The gates' own memory serves for what the steps make of them: a linear map does not want its output back.
        ran = direction.kind.forward(
            gates.detach().reshape(-1, gates.shape[-1]),
            [first.detach().to(dtype) for first in firsts],
            direction.weights(plain, dtype),
            direction.steps,
        )
    # Both tell whose the rows are; what is in the graph can be followed furthest.
    rows = gates if gates.requires_grad else x
    product = recurrent_product(ran.before_NP.view(*lead, -1), _given(weights["hh"]), weights["b_hh"], rows)
    projected = None
    if ran.unprojected_NH is not None:
        projected = recurrent_product(ran.unprojected_NH.view(*lead, -1), _given(weights["hr"]), None, rows)
        projected = projected.reshape(-1, projected.shape[-1])
    entered = (gates.reshape(-1, gates.shape[-1]), product.reshape(-1, product.shape[-1]), projected, *firsts)
    out_NP, *ends = _Recurrence.apply(direction, (*ran.kept, *plain), (ran.out_NP, *ran.ends), *entered)
    return out_NP.view(*lead, -1), *ends


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _entered(first: Tensor, gates: Tensor, count: int) -> Tensor:
    """Connect an initial state computed from parameters to the rows of the first step, which identify samples."""
    if not has_torch_function((first,)):
        return first
    rows = (gates[0] if gates.dim() == 3 else gates[:count])[:, :1]
    return torch.where(torch.ones((), dtype=torch.bool, device=rows.device), first, rows.to(first.dtype))


def _layers(
    name: str, x: Tensor, hx: Any, given: Mapping[str, Any], sizes: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers; returns the last one's states after all rows, and the last states of all."""
    states = list(hx) if name == "lstm" else [hx]
    params, directions = list(given["params"]), 2 if given["bidirectional"] else 1
    biases = bool(given["has_biases"])
    per_direction = len(params) // (given["num_layers"] * directions)
    projected = per_direction % 2 == 1
    names = ("ih", "hh", *(("b_ih", "b_hh") if biases else ()), *(("hr",) if projected else ()))
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(given["num_layers"]):
        outputs = []
        for side in range(directions):
            number = layer * directions + side
            own = params[number * per_direction : (number + 1) * per_direction]
            weights = {**dict.fromkeys(("b_ih", "b_hh", "hr")), **dict(zip(names, own, strict=True))}
            direction = _Direction(KINDS[name], Steps(sizes, reverse=side == 1), biases, projected)
            out, *last = _run(direction, x, [state[number] for state in states], weights)
            outputs.append(out)
            for place, end in zip(ends, last, strict=True):
                place.append(end)
        x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if given["dropout"] and given["train"] and layer + 1 < given["num_layers"]:
            x = functional.dropout(x, given["dropout"])
    return x, [torch.stack(place) for place in ends]


def is_packed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments of a recurrent layer's function are those of a packed sequence."""
    return "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))


def _layer(name: str) -> Callable[..., tuple[Tensor, ...]]:
    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        packed = is_packed(args, kwargs)
        given = {**dict(zip(_PACKED if packed else _PADDED, args, strict=False)), **kwargs}
        if packed:
            out, ends = _layers(name, given["data"], given["hx"], given, tuple(given["batch_sizes"].tolist()))
            return out, *ends
        first = given.get("batch_first", False)
        x = given["input"].transpose(0, 1) if first else given["input"]
        if x.shape[0] == 0:
            shape = tuple(given["input"].shape)
            raise DataError(f"{name}: an input of shape {shape} has no step. Give every sequence at least one.")
        out, ends = _layers(name, x, given["hx"], given, (x.shape[1],) * x.shape[0])
        return out.transpose(0, 1) if first else out, *ends

    return run


LAYERS: Final[Mapping[str, Callable[..., tuple[Tensor, ...]]]] = {name: _layer(name) for name in KINDS}
# The torch functions of this family, written out in operations that have rules: same arguments, same results.
WRITTEN_OUT: Final[Mapping[str, Callable[..., Any]]] = {**LAYERS, **CELLS}
