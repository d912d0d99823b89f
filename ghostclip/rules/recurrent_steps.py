"""The time steps of one direction of one recurrent layer, forward and backward: LSTM, GRU and RNN.

A sequence is stored as the rows of all its steps, one step after the other: step t has ``sizes[t]`` rows, those of the
sequences that are at least so long (all of them, where none was packed). The part of the gates that comes from the
input is computed for all steps at once before; what remains a step is one product with the state. Backwards likewise:
all factors that do not depend on the gradient are formed for all steps at once.

Shape letters: N rows of all steps, n rows of a step, B sequences, H hidden features, P features of the state (H unless
projected), G·H gates.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor


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

    out_NP: Tensor
    # the state of every sequence after its last step, ``(h, c)`` or ``(h,)``, shape ``(B, P)`` and ``(B, H)``
    ends: tuple[Tensor, ...]
    before_NP: Tensor
    kept: tuple[Tensor, ...]
    unprojected_NH: Tensor | None = None  # the state before its projection; None where there is none


@dataclass
class RecurrentGradients:
    """Gradients that a backward returns."""

    gates_NG: Tensor  # gradient of the gates' part from the input
    hidden_NG: Tensor  # gradient of their part from the state; the same tensor where the two are added
    firsts: tuple[Tensor, ...]
    # gradient of the projected states; None where nothing is projected
    projected_NP: Tensor | None = field(default=None)


class Kind(ABC):
    """One kind of recurrent layer."""

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
    """A state that walks through the steps: the rows of sequences that are over, or not begun, stay as they are."""

    def __init__(self, first: Tensor) -> None:
        self.whole = first.clone(memory_format=torch.contiguous_format)
        self._views: dict[int, Tensor] = {}

    def rows(self, count: int) -> Tensor:
        if count not in self._views:
            self._views[count] = self.whole[:count]
        return self._views[count]


class LSTM(Kind):
    """``c' = f·c + i·g``, ``h = o·tanh(c')``, perhaps projected."""

    # Slopes of three gates by the cell and of one by the state, two more, and the state's gradient, less the gates'.
    gates, beside = 4, 3 + 4 - 4

    def forward(self, gates_NG: Tensor, firsts: Sequence[Tensor], weights: Weights, steps: Steps) -> Ran:
        """Run all steps; leaves activated gates in ``gates_NG``."""
        if weights.bias is not None:
            gates_NG += weights.bias
        h, c = _State(firsts[0]), _State(firsts[1])
        width, hh_PG = firsts[1].shape[1], weights.hh.t()
        hidden_NH = gates_NG.new_empty(gates_NG.shape[0], width)
        cells_NH = torch.empty_like(hidden_NH)
        out_NP = hidden_NH if weights.hr is None else gates_NG.new_empty(gates_NG.shape[0], weights.hr.shape[0])
        in_forget, update, output = gates_NG.split((2 * width, width, width), 1)
        tensors = (gates_NG, in_forget, *in_forget.chunk(2, 1), update, output, cells_NH, hidden_NH, out_NP)
        blocks = [tensor.split(steps.sizes) for tensor in tensors]
        for step in steps.order():
            gates, i_f, i, f, g, o, cell, hidden, out = (block[step] for block in blocks)
            size = steps.sizes[step]
            h_n, c_n = h.rows(size), c.rows(size)
            gates.addmm_(h_n, hh_PG)
            i_f.sigmoid_()
            c_n.mul_(f).addcmul_(i, g.tanh_())
            cell.copy_(c_n)
            torch.mul(torch.tanh(c_n), o.sigmoid_(), out=hidden)
            if weights.hr is not None:
                torch.mm(hidden, weights.hr.t(), out=out)
            h_n.copy_(out)
        kept = (gates_NG, cells_NH, steps.before(firsts[1], cells_NH))
        projected = None if weights.hr is None else hidden_NH
        return Ran(out_NP, (h.whole, c.whole), steps.before(firsts[0], out_NP), kept, projected)

    def backward(
        self, ran: Sequence[Tensor], grad_NP: Tensor, ends: Sequence[Tensor], weights: Weights, steps: Steps
    ) -> RecurrentGradients:
        gates_NG, cells_NH, before_NH = ran
        width = cells_NH.shape[1]
        i, f, g, o = gates_NG.split(width, 1)
        tanh_NH = torch.tanh(cells_NH)
        # d gate = d cell times these, for i, f and g; d output gate = d hidden times its own.
        by_cell_N3H = torch.stack([g * i * (1 - i), before_NH * f * (1 - f), i * (1 - g * g)], 1)
        by_hidden_NH = tanh_NH * o * (1 - o)
        to_cell_NH = o * (1 - tanh_NH * tanh_NH)
        grads_N4H = torch.empty_like(gates_NG).unflatten(1, (4, width))
        total_NP = torch.empty_like(grad_NP)
        h, c = _State(ends[0]), _State(ends[1])
        tensors = (
            grad_NP, total_NP, grads_N4H[:, :3], grads_N4H[:, 3], grads_N4H.flatten(1), by_cell_N3H, by_hidden_NH,
            to_cell_NH, f,
        )  # fmt: skip
        blocks = [tensor.split(steps.sizes) for tensor in tensors]
        for step in reversed(steps.order()):
            grad, total, d_ifg, d_o, d_gates, by_cell, by_hidden, to_cell, forget = (block[step] for block in blocks)
            size = steps.sizes[step]
            h_n, c_n = h.rows(size), c.rows(size)
            d_hidden = torch.add(grad, h_n, out=total)
            if weights.hr is not None:
                d_hidden = d_hidden @ weights.hr
            c_n.addcmul_(d_hidden, to_cell)
            torch.mul(by_cell, c_n.unsqueeze(1), out=d_ifg)
            torch.mul(by_hidden, d_hidden, out=d_o)
            c_n.mul_(forget)
            torch.mm(d_gates, weights.hh, out=h_n)
        gates = grads_N4H.flatten(1)
        return RecurrentGradients(gates, gates, (h.whole, c.whole), None if weights.hr is None else total_NP)


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
            n.addcmul_(r, product[:, 2 * width :]).tanh_()
            h_n.copy_(torch.lerp(n, h_n, z, out=out))
        before_NH = steps.before(firsts[0], out_NH)
        kept = (gates_NG, product_NG[:, 2 * width :].clone(), before_NH)
        return Ran(out_NH, (h.whole,), before_NH, kept)

    def backward(
        self, ran: Sequence[Tensor], grad_NP: Tensor, ends: Sequence[Tensor], weights: Weights, steps: Steps
    ) -> RecurrentGradients:
        gates_NG, product_NH, before_NH = ran
        r, z, n = gates_NG.chunk(3, 1)
        new_NH = (1 - z) * (1 - n * n)
        # What the gradient of the state is multiplied by to give that of the product's three parts.
        by_state_N3H = torch.stack([new_NH * product_NH * r * (1 - r), (before_NH - n) * z * (1 - z), new_NH * r], 1)
        grads_N3H = torch.empty_like(by_state_N3H)
        total_NH = torch.empty_like(new_NH)
        h = _State(ends[0])
        tensors = (grad_NP, total_NH, grads_N3H, grads_N3H.flatten(1), by_state_N3H, z)
        blocks = [tensor.split(steps.sizes) for tensor in tensors]
        for step in reversed(steps.order()):
            grad, total, d_product, d_flat, by_state, update = (block[step] for block in blocks)
            h_n = h.rows(steps.sizes[step])
            torch.add(grad, h_n, out=total)
            torch.mul(by_state, total.unsqueeze(1), out=d_product)
            torch.mul(total, update, out=h_n)
            h_n.addmm_(d_flat, weights.hh)
        gates_N3H = torch.cat([grads_N3H[:, :2], (total_NH * new_NH).unsqueeze(1)], 1)
        return RecurrentGradients(gates_N3H.flatten(1), grads_N3H.flatten(1), (h.whole,))


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
