"""Recurrent layers and cells: LSTM, GRU and RNN, written out so that every parameter meets its data in a product.

A layer's weights meet data twice: ``W_ih`` the inputs of all steps, ``W_hh`` the states before all steps (``W_hr``, of
a projection, the states themselves). The first is an ordinary linear map. The second is recursive, but once the steps
have run, all states are known, and ``W_hh``'s gradient is that of a linear map on them. It is written as such: an
addend of zeros to the gates, whose gradient the time steps' own backward gives, and which a rule takes for the linear
map's output.

Dense sequences are ``(T, B, features)`` here whatever ``batch_first`` says; packed ones are the rows of all steps, one
step after the other: step t has ``sizes[t]`` rows, those of the sequences that are at least so long. The part of the
gates that comes from the input is computed for all steps at once before; what remains a step is one product with the
state. Backwards likewise: all factors that do not depend on the gradient are formed for all steps at once.

Shape letters: T steps, B sequences, N rows of all steps, n rows of a step, L rows: (T, B) or (N), H hidden features, P
features of the state (H unless projected), G·H gates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from ghostclip import _torch
from ghostclip.errors import DataError, UncoveredParameterError
from ghostclip.factors import Factor, Outer
from ghostclip.rules.linear import position_sum
from ghostclip.rules.registry import Call, Captured, Split, register_op


def _gates(arguments: Mapping[str, Any], first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of input and of state with their weights, which the gates add."""
    from_input = functional.linear(arguments["input"], arguments["w_ih"], arguments.get("b_ih"))
    return from_input, functional.linear(first, arguments["w_hh"], arguments.get("b_hh"))


def _lstm(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Run one step of an LSTM cell; return (h, c)."""
    h, c = arguments["hx"]
    from_input, from_state = _gates(arguments, h)
    i, f, g, o = (from_input + from_state).chunk(4, 1)
    cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(arguments: Mapping[str, Any]) -> Tensor:
    """Run one step of a GRU cell."""
    h: Tensor = arguments["hx"]
    from_input, from_state = _gates(arguments, h)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_input.chunk(3, 1), from_state.chunk(3, 1)
    new = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (h - new) * (x_z + h_z).sigmoid() + new


def _rnn(activation: Callable[[Tensor], Tensor], arguments: Mapping[str, Any]) -> Tensor:
    """Run one step of an RNN cell."""
    from_input, from_state = _gates(arguments, arguments["hx"])
    return activation(from_input + from_state)


def _called(cell: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """Return a cell with torch's own arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return cell({**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs})

    return run


_ARGUMENTS: Final[Sequence[str]] = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
# The torch functions, with torch's own arguments and results.
CELLS: Final[Mapping[str, Callable[..., Any]]] = {
    "lstm_cell": _called(_lstm),
    "gru_cell": _called(_gru),
    "rnn_tanh_cell": _called(partial(_rnn, Tensor.tanh)),
    "rnn_relu_cell": _called(partial(_rnn, Tensor.relu)),
}


# A gradient by what an activation returned: ``grad · y · (1 - y)``, ``grad · (1 - y²)``.
_sigmoid_backward: Final = torch.ops.aten.sigmoid_backward
_tanh_backward: Final = torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class Steps:
    """The rows of each step, and the direction of time."""

    sizes: tuple[int, ...]  # rows of every step, never growing
    reverse: bool = False  # whether the last step comes first

    @property
    def uniform(self) -> bool:
        """Whether every sequence has every step."""
        return self.sizes[0] == self.sizes[-1]

    def order(self) -> range:
        """Return the numbers of the steps as time runs."""
        last = len(self.sizes)
        return range(last - 1, -1, -1) if self.reverse else range(last)

    def before(self, first_BP: Tensor, states_NP: Tensor) -> Tensor:
        """Return the state before every row, ``(N, P)``."""
        rows, batch = states_NP.shape[0], self.sizes[0]
        if self.uniform:
            return torch.cat([states_NP[batch:], first_BP] if self.reverse else [first_BP, states_NP[: rows - batch]])
        return torch.cat([first_BP, states_NP])[self._places(states_NP.device)]

    def _places(self, device: torch.device) -> Tensor:
        """Return the index of each row's previous state among the initial states and the rows."""
        sizes, batch = self.sizes, self.sizes[0]
        starts = [0]
        for size in sizes[:-1]:
            starts.append(starts[-1] + size)
        parts = []
        for step, size in enumerate(sizes):
            if self.reverse:
                later = sizes[step + 1] if step + 1 < len(sizes) else 0
                start = starts[step + 1] if later else 0
                parts += [torch.arange(batch + start, batch + start + later), torch.arange(later, size)]
            else:
                start = batch + starts[step - 1] if step else 0
                parts.append(torch.arange(start, start + size))
        return torch.cat(parts).to(device)


@dataclass(frozen=True)
class Weights:
    """The weights of one direction of one layer, detached."""

    hh: Tensor  # state to gates, shape ``(G·H, P)``
    bias: Tensor | None = None  # added with it, shape ``(G·H,)``, or None
    hr: Tensor | None = None  # projection of the state, shape ``(P, H)``, or None


@dataclass
class Ran:
    """Results of a forward for the backward and for the factors."""

    out_NP: Tensor  # states after every row
    # the state of every sequence after its last step, ``(h, c)`` or ``(h,)``, shape ``(B, P)`` and ``(B, H)``
    ends: tuple[Tensor, ...]
    before_NP: Tensor  # states before every row
    kept: tuple[Tensor, ...]  # what the backward reads
    unprojected_NH: Tensor | None = None  # the state before its projection; None where there is none


@dataclass
class RecurrentGradients:
    """Gradients that a backward returns."""

    gates_NG: Tensor  # gradient of the gates' part from the input
    hidden_NG: Tensor  # gradient of their part from the state; the same tensor where the two are added
    firsts: tuple[Tensor, ...]  # gradients of the initial states
    # gradient of the projected states; None where nothing is projected
    projected_NP: Tensor | None = field(default=None)


class Kind(ABC):
    """One kind of recurrent layer: how all of its steps run, forward and backward."""

    gates: int  # G
    # what the backward holds beside the gradient that arrives and each of its results, in values for every row and unit
    # of the state; what is returned twice counts once
    beside: int

    @abstractmethod
    def forward(self, gates_NG: Tensor, firsts: Sequence[Tensor], weights: Weights, steps: Steps) -> Ran:
        """Run all steps; ``gates_NG`` is the gates' part from the input with its bias, and is overwritten."""

    @abstractmethod
    def backward(
        self, ran: Sequence[Tensor], grad_NP: Tensor, ends: Sequence[Tensor], weights: Weights, steps: Steps
    ) -> RecurrentGradients:
        """Run all steps backwards; ``ran`` is ``Ran.kept``, ``grad_NP`` and ``ends`` are gradients of the states."""


class _State:
    """State (B, H) of all sequences while steps run; a step uses the rows of the sequences that have it."""

    def __init__(self, first: Tensor) -> None:
        self.whole = first.clone(memory_format=torch.contiguous_format)  # (B, H)
        self._views: dict[int, Tensor] = {}  # by number of rows

    def rows(self, count: int) -> Tensor:
        """Return the first rows, a view."""
        if count not in self._views:
            self._views[count] = self.whole[:count]
        return self._views[count]


class LSTM(Kind):
    """``c' = f·c + i·g``, ``h = o·tanh(c')``, perhaps projected."""

    # Slopes of three gates by the cell and of one by the state, one more, and the state's gradient, less the gates'.
    gates, beside = 4, 3 + 3 - 4

    def forward(self, gates_NG: Tensor, firsts: Sequence[Tensor], weights: Weights, steps: Steps) -> Ran:
        """Run all steps; leaves activated gates in ``gates_NG``."""
        if weights.bias is not None:
            gates_NG += weights.bias
        h, c = _State(firsts[0]), _State(firsts[1])
        width, hh_PG = firsts[1].shape[1], weights.hh.t()
        hidden_NH = gates_NG.new_empty(gates_NG.shape[0], width)
        cells_NH, tanh_NH = torch.empty_like(hidden_NH), torch.empty_like(hidden_NH)
        out_NP = hidden_NH if weights.hr is None else gates_NG.new_empty(gates_NG.shape[0], weights.hr.shape[0])
        in_forget, update, output = gates_NG.split((2 * width, width, width), 1)
        tensors = (gates_NG, in_forget, *in_forget.chunk(2, 1), update, output, cells_NH, tanh_NH, hidden_NH, out_NP)
        blocks = [tensor.split(steps.sizes) for tensor in tensors]
        for step in steps.order():
            gates, i_f, i, f, g, o, cell, tanh, hidden, out = (block[step] for block in blocks)
            size = steps.sizes[step]
            h_n, c_n = h.rows(size), c.rows(size)
            gates.addmm_(h_n, hh_PG)
            i_f.sigmoid_()
            # Of rows that lie together: tanh of a part of each row takes several times as long.
            update = g.contiguous().tanh_()
            g.copy_(update)
            torch.mul(c_n, f, out=cell)
            c_n.copy_(cell.addcmul_(i, update))
            torch.mul(torch.tanh(cell, out=tanh), o.sigmoid_(), out=hidden)
            if weights.hr is not None:
                torch.mm(hidden, weights.hr.t(), out=out)
            h_n.copy_(out)
        saved = (gates_NG, tanh_NH, steps.before(firsts[1], cells_NH))
        projected = None if weights.hr is None else hidden_NH
        return Ran(out_NP, (h.whole, c.whole), steps.before(firsts[0], out_NP), saved, projected)

    def backward(
        self, ran: Sequence[Tensor], grad_NP: Tensor, ends: Sequence[Tensor], weights: Weights, steps: Steps
    ) -> RecurrentGradients:
        """Run all steps backwards; return the gradients of the gates, of initial states, and of the projection."""
        gates_NG, tanh_NH, before_NH = ran
        width = tanh_NH.shape[1]
        i, f, g, o = gates_NG.split(width, 1)
        # d gate = d cell times these, for i, f and g; d output gate = d hidden times its own. One product each: over a
        # third axis torch's products take several times as long.
        by_cell = _sigmoid_backward(g, i), _sigmoid_backward(before_NH, f), _tanh_backward(i, g)
        by_hidden_NH, to_cell_NH = _sigmoid_backward(tanh_NH, o), _tanh_backward(o, tanh_NH)
        grads_NG = torch.empty_like(gates_NG)
        total_NP = torch.empty_like(grad_NP)
        h, c = _State(ends[0]), _State(ends[1])
        tensors = (
            grad_NP, total_NP, grads_NG, *grads_NG.split(width, 1), *by_cell, by_hidden_NH, to_cell_NH, f,
        )  # fmt: skip
        blocks = [tensor.split(steps.sizes) for tensor in tensors]
        for step in reversed(steps.order()):
            grad, total, d_gates, d_i, d_f, d_g, d_o, by_i, by_f, by_g, by_hidden, to_cell, forget = (
                block[step] for block in blocks
            )
            size = steps.sizes[step]
            h_n, c_n = h.rows(size), c.rows(size)
            d_hidden = torch.add(grad, h_n, out=total)
            if weights.hr is not None:
                d_hidden = d_hidden @ weights.hr
            c_n.addcmul_(d_hidden, to_cell)
            torch.mul(by_i, c_n, out=d_i)
            torch.mul(by_f, c_n, out=d_f)
            torch.mul(by_g, c_n, out=d_g)
            torch.mul(by_hidden, d_hidden, out=d_o)
            c_n.mul_(forget)
            torch.mm(d_gates, weights.hh, out=h_n)
        return RecurrentGradients(grads_NG, grads_NG, (h.whole, c.whole), None if weights.hr is None else total_NP)


class GRU(Kind):
    """``h' = n + z·(h - n)`` with ``n = tanh(x_n + r·(W_n h + b_n))``: the reset gate comes after the product."""

    # Slopes of three gates by the state, one of the new one, and the state's gradient.
    gates, beside = 3, 3 + 2

    def forward(self, gates_NG: Tensor, firsts: Sequence[Tensor], weights: Weights, steps: Steps) -> Ran:
        """Run all steps; leaves activated gates in ``gates_NG``."""
        width, hh_PG = firsts[0].shape[1], weights.hh.t()
        h = _State(firsts[0])
        product_NG = torch.empty_like(gates_NG)
        out_NH = gates_NG.new_empty(gates_NG.shape[0], width)
        blocks = [tensor.split(steps.sizes) for tensor in (gates_NG, product_NG, out_NH)]
        for step in steps.order():
            gates, product, out = (block[step] for block in blocks)
            h_n = h.rows(steps.sizes[step])
            if weights.bias is None:
                torch.mm(h_n, hh_PG, out=product)
            else:
                torch.addmm(weights.bias, h_n, hh_PG, out=product)
            r_z, n = gates.split((2 * width, width), 1)
            r, z = r_z.add_(product[:, : 2 * width]).sigmoid_().chunk(2, 1)
            update = torch.addcmul(n, r, product[:, 2 * width :]).tanh_()
            n.copy_(update)
            h_n.copy_(torch.lerp(update, h_n, z, out=out))
        before_NH = steps.before(firsts[0], out_NH)
        saved = (gates_NG, product_NG[:, 2 * width :].clone(), before_NH)
        return Ran(out_NH, (h.whole,), before_NH, saved)

    def backward(
        self, ran: Sequence[Tensor], grad_NP: Tensor, ends: Sequence[Tensor], weights: Weights, steps: Steps
    ) -> RecurrentGradients:
        """Run all steps backwards; return gradients of the gates' input and state parts, and of the initial state."""
        gates_NG, product_NH, before_NH = ran
        r, z, n = gates_NG.chunk(3, 1)
        new_NH = _tanh_backward(1 - z, n)
        # What the gradient of the state is multiplied by to give that of the product's three parts.
        by_state = (
            _sigmoid_backward(new_NH * product_NH, r), _sigmoid_backward(before_NH - n, z), new_NH * r,
        )  # fmt: skip
        grads_NG, total_NH = torch.empty_like(gates_NG), torch.empty_like(new_NH)
        h = _State(ends[0])
        tensors = (grad_NP, total_NH, grads_NG, *grads_NG.chunk(3, 1), *by_state, z)
        blocks = [tensor.split(steps.sizes) for tensor in tensors]
        for step in reversed(steps.order()):
            grad, total, d_product, d_r, d_z, d_n, by_r, by_z, by_n, update = (block[step] for block in blocks)
            h_n = h.rows(steps.sizes[step])
            torch.add(grad, h_n, out=total)
            torch.mul(by_r, total, out=d_r)
            torch.mul(by_z, total, out=d_z)
            torch.mul(by_n, total, out=d_n)
            torch.mul(total, update, out=h_n)
            h_n.addmm_(d_product, weights.hh)
        gates_NG = torch.cat([grads_NG[:, : 2 * z.shape[1]], total_NH * new_NH], 1)
        return RecurrentGradients(gates_NG, grads_NG, (h.whole,))


class RNN(Kind):
    """``h' = act(x + W h + b)`` with tanh or ReLU."""

    # The activation's slope, less the gates' gradient.
    gates, beside = 1, 0

    def __init__(self, *, relu: bool) -> None:
        self._relu = relu

    def forward(self, gates_NG: Tensor, firsts: Sequence[Tensor], weights: Weights, steps: Steps) -> Ran:
        """Run all steps; leaves the states in ``gates_NG``."""
        if weights.bias is not None:
            gates_NG += weights.bias
        h, hh_PG = _State(firsts[0]), weights.hh.t()
        blocks = gates_NG.split(steps.sizes)
        for step in steps.order():
            out, h_n = blocks[step], h.rows(steps.sizes[step])
            torch.addmm(out, h_n, hh_PG, out=out)
            h_n.copy_(out.relu_() if self._relu else out.tanh_())
        # What the backward reads must not change with what the model does to its output in place.
        return Ran(gates_NG.clone(), (h.whole,), steps.before(firsts[0], gates_NG), (gates_NG,))

    def backward(
        self, ran: Sequence[Tensor], grad_NP: Tensor, ends: Sequence[Tensor], weights: Weights, steps: Steps
    ) -> RecurrentGradients:
        """Run all steps backwards: each state's gradient times the activation's slope, carried back by the weight."""
        (out_NH,) = ran
        slope_NH = (out_NH > 0).to(out_NH.dtype) if self._relu else 1 - out_NH * out_NH
        grads_NH = torch.empty_like(out_NH)
        h = _State(ends[0])
        blocks = [tensor.split(steps.sizes) for tensor in (grad_NP, grads_NH, slope_NH)]
        for step in reversed(steps.order()):
            grad, d_gates, slope = (block[step] for block in blocks)
            h_n = h.rows(steps.sizes[step])
            torch.mul(h_n.add_(grad), slope, out=d_gates)
            torch.mm(d_gates, weights.hh, out=h_n)
        return RecurrentGradients(grads_NH, grads_NH, (h.whole,))


KINDS: Final = {"lstm": LSTM(), "gru": GRU(), "rnn_tanh": RNN(relu=False), "rnn_relu": RNN(relu=True)}


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
    """Rule for a recurrent layer's product of weight and known states: weight ``Outer``, bias ``Dense``."""
    states, shape = call.values["states"], call.values["weight"].shape
    needs_weight, needs_bias, num_batch_dims = "weight" in call.tracked, "bias" in call.tracked, states.dim() - 1

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTO = split(grad, num_batch_dims)
        factor_of: dict[str, Factor] = {}
        if needs_weight:
            factor_of["weight"] = Outer(split(saved[0], num_batch_dims), g_BTO, shape=shape)
        if needs_bias:
            factor_of["bias"] = position_sum(g_BTO)
        return factor_of

    return Captured((states,) if needs_weight else (), call.values["rows"], num_batch_dims, factors, "outer product")


@dataclass(frozen=True)
class _Direction:
    """One direction of one layer: its kind, the rows of each step, and which weights it has."""

    kind: Kind
    steps: Steps
    bias: bool  # whether it has biases
    projected: bool  # whether it projects its hidden state (`proj_size`)

    def weights(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Weights:
        """Return weights (hh, bias or hr, ...) in the dtype of the steps."""
        remaining = iter(tensor.to(dtype) for tensor in tensors)
        hh = next(remaining)
        return Weights(hh, next(remaining) if self.bias else None, next(remaining) if self.projected else None)


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
        activations = saved[: ctx.kept]
        like = activations[0]
        with _plainly(like):
            out_grads = [
                like.new_zeros(shape) if grad is None else grad.to(like.dtype).contiguous()
                for grad, shape in zip(grads, ctx.shapes, strict=True)
            ]
            weights = direction.weights(saved[ctx.kept :], like.dtype)
            gradients = direction.kind.backward(activations, out_grads[0], out_grads[1:], weights, direction.steps)
        back = (gradients.gates_NG, gradients.hidden_NG, gradients.projected_NP, *gradients.firsts)
        wanted = zip(back, ctx.dtypes, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(g.to(dtype) if needs and g is not None else None for g, dtype, needs in wanted)


def _plainly(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast."""
    return torch.autocast(like.device.type, enabled=False)


def _run(
    direction: _Direction, x: Tensor, firsts: Sequence[Tensor], weights: Mapping[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """Run one direction of one layer; return states after all rows, ``(*L, P)``, and the last ones."""
    gates = functional.linear(x, _required(weights["ih"]), weights["b_ih"])
    firsts = [_entered(first, gates, direction.steps.sizes[0]) for first in firsts]
    if direction.kind is KINDS["gru"]:
        gates = gates.to(torch.promote_types(gates.dtype, firsts[0].dtype))
    lead, dtype = gates.shape[:-1], gates.dtype
    plain = [tensor.detach() for name in ("hh", "b_hh", "hr") if (tensor := weights[name]) is not None]
    with _torch.overrides_off(), torch.no_grad(), _plainly(gates):
        # The gates' own memory serves for what the steps make of them: a linear map does not want its output back.
        ran = direction.kind.forward(
            gates.detach().reshape(-1, gates.shape[-1]),
            [first.detach().to(dtype) for first in firsts],
            direction.weights(plain, dtype),
            direction.steps,
        )
    # Both tell whose the rows are; what is in the graph can be followed furthest.
    rows = gates if gates.requires_grad else x
    product = recurrent_product(ran.before_NP.view(*lead, -1), _required(weights["hh"]), weights["b_hh"], rows)
    projected = None
    if ran.unprojected_NH is not None:
        projected = recurrent_product(ran.unprojected_NH.view(*lead, -1), _required(weights["hr"]), None, rows)
        projected = projected.reshape(-1, projected.shape[-1])
    entered = (gates.reshape(-1, gates.shape[-1]), product.reshape(-1, product.shape[-1]), projected, *firsts)
    out_NP, *ends = _Recurrence.apply(direction, (*ran.kept, *plain), (ran.out_NP, *ran.ends), *entered)
    return out_NP.view(*lead, -1), *ends


def _required(tensor: Tensor | None) -> Tensor:
    """Return a weight that every layer has."""
    assert tensor is not None
    return tensor


def _entered(first: Tensor, gates: Tensor, count: int) -> Tensor:
    """Connect an initial state computed from parameters to the rows of the first step, which identify samples."""
    if not has_torch_function((first,)):
        return first
    rows = (gates[0] if gates.dim() == 3 else gates[:count])[:, :1]
    return torch.where(torch.ones((), dtype=torch.bool, device=rows.device), first, rows.to(first.dtype))


def _layers(
    name: str, x: Tensor, hx: Any, arguments: Mapping[str, Any], sizes: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers; returns the last one's states after all rows, and the last states of all."""
    states = list(hx) if name == "lstm" else [hx]
    params, directions = list(arguments["params"]), 2 if arguments["bidirectional"] else 1
    biases = bool(arguments["has_biases"])
    per_direction = len(params) // (arguments["num_layers"] * directions)
    projected = per_direction % 2 == 1
    names = ("ih", "hh", *(("b_ih", "b_hh") if biases else ()), *(("hr",) if projected else ()))
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(arguments["num_layers"]):
        outputs = []
        for side in range(directions):
            number = layer * directions + side
            layer_params = params[number * per_direction : (number + 1) * per_direction]
            weights = {**dict.fromkeys(("b_ih", "b_hh", "hr")), **dict(zip(names, layer_params, strict=True))}
            direction = _Direction(KINDS[name], Steps(sizes, reverse=side == 1), biases, projected)
            out, *last = _run(direction, x, [state[number] for state in states], weights)
            outputs.append(out)
            for layer_ends, end in zip(ends, last, strict=True):
                layer_ends.append(end)
        x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if arguments["dropout"] and arguments["train"] and layer + 1 < arguments["num_layers"]:
            x = functional.dropout(x, arguments["dropout"])
    return x, [torch.stack(layer_ends) for layer_ends in ends]


def is_packed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments of a recurrent layer's function are those of a packed sequence."""
    return "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))


def _layer(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return a torch function of recurrent layers written out in operations that have rules."""

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        packed = is_packed(args, kwargs)
        bound = {**dict(zip(_PACKED if packed else _PADDED, args, strict=False)), **kwargs}
        if packed:
            out, ends = _layers(name, bound["data"], bound["hx"], bound, tuple(bound["batch_sizes"].tolist()))
            return out, *ends
        first = bound.get("batch_first", False)
        # Rows that lie together make the gates' part from the input one product, not one a step.
        x = bound["input"].transpose(0, 1).contiguous() if first else bound["input"]
        if x.shape[0] == 0:
            shape = tuple(bound["input"].shape)
            raise DataError(f"{name}: an input of shape {shape} has no step. Give every sequence at least one.")
        out, ends = _layers(name, x, bound["hx"], bound, (x.shape[1],) * x.shape[0])
        return out.transpose(0, 1) if first else out, *ends

    return run


LAYERS: Final[Mapping[str, Callable[..., tuple[Tensor, ...]]]] = {name: _layer(name) for name in KINDS}
# The torch functions of this family, written out in operations that have rules: same arguments, same results.
WRITTEN_OUT: Final[Mapping[str, Callable[..., Any]]] = {**LAYERS, **CELLS}
