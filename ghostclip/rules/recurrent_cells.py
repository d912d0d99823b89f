"""Recurrent cells: one step of an LSTM, GRU or RNN, as torch has it in one function, written out in two linear maps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn import functional


def _gates(given: Mapping[str, Any], first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of input and state in the gates."""
    from_input = functional.linear(given["input"], given["w_ih"], given.get("b_ih"))
    return from_input, functional.linear(first, given["w_hh"], given.get("b_hh"))


def _lstm(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    h, c = given["hx"]
    from_input, from_state = _gates(given, h)
    i, f, g, o = (from_input + from_state).chunk(4, 1)
    cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(given: Mapping[str, Any]) -> Tensor:
    h: Tensor = given["hx"]
    from_input, from_state = _gates(given, h)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_input.chunk(3, 1), from_state.chunk(3, 1)
    new = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (h - new) * (x_z + h_z).sigmoid() + new


def _rnn_tanh(given: Mapping[str, Any]) -> Tensor:
    from_input, from_state = _gates(given, given["hx"])
    return (from_input + from_state).tanh()


def _rnn_relu(given: Mapping[str, Any]) -> Tensor:
    from_input, from_state = _gates(given, given["hx"])
    return (from_input + from_state).relu()


def _called(cell: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return cell({**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs})

    return run


_ARGUMENTS: Final[Sequence[str]] = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
# The torch functions, with torch's own arguments and results.
CELLS: Final[Mapping[str, Callable[..., Any]]] = {
    "lstm_cell": _called(_lstm),
    "gru_cell": _called(_gru),
    "rnn_tanh_cell": _called(_rnn_tanh),
    "rnn_relu_cell": _called(_rnn_relu),
}
