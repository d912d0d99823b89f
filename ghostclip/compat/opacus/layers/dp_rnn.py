"""Recurrent layers and cells under Opacus's names.

They are torch's classes, whose constructors take their arguments in Opacus's order already (all but ``RNN``'s);
``state_init`` and ``batch_size_t`` are Opacus's. What Opacus's own classes leave out or compute otherwise
(``proj_size``; dropout, which they also put on the state that a layer hands to its next step) is torch's here.

Shape letters: B samples, H hidden features.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ghostclip.compat.opacus._refused import refusing
from ghostclip.errors import UnsupportedModelError

__getattr__ = refusing(__name__)


class RNNLinear(nn.Linear):
    """``torch.nn.Linear`` under the name that Opacus gives to those inside its cells.

    Attributes:
        max_batch_len: Set by scripts for Opacus; not needed here.
    """

    max_batch_len: int


class _TakesStateInit:
    """Lets the initial state be given as ``state_init``, as in Opacus, or as ``hx``, as in torch."""

    def forward(
        self,
        input: Tensor | PackedSequence,  # noqa: A002  (torch's and Opacus's name)
        hx: Any = None,
        state_init: Any = None,
    ) -> Any:
        """Run the layer as torch does.

        Args:
            input: A batch of sequences, padded or packed.
            hx: The initial state; zeros where there is none.
            state_init: The same under Opacus's name.

        Returns:
            ``(outputs, last state)`` of torch's module.
        """
        forward: Any = super().forward  # type: ignore[misc]
        return forward(input, hx if state_init is None else state_init)


class DPLSTM(_TakesStateInit, nn.LSTM):
    """``torch.nn.LSTM``, its initial state also as ``state_init``."""


class DPGRU(_TakesStateInit, nn.GRU):
    """``torch.nn.GRU``, its initial state also as ``state_init``."""


class DPRNN(_TakesStateInit, nn.RNN):
    """``torch.nn.RNN`` with Opacus's constructor."""

    def __init__(  # noqa: PLR0913, PLR0917  (Opacus's signature)
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002
        batch_first: bool = False,  # noqa: FBT001, FBT002
        dropout: float = 0,
        bidirectional: bool = False,  # noqa: FBT001, FBT002
        proj_size: int = 0,
        nonlinearity: str = "tanh",
    ) -> None:
        """Make the layer.

        Args:
            input_size: Features of the input.
            hidden_size: H.
            num_layers: Layers on top of each other.
            bias: Whether there are biases.
            batch_first: Whether sequences are ``(B, T, features)``.
            dropout: Probability between layers.
            bidirectional: Whether a second pass runs from the end.
            proj_size: 0; only an LSTM has projections.
            nonlinearity: ``"tanh"`` or ``"relu"``.

        Raises:
            UnsupportedModelError: A projection is asked for.
        """
        if proj_size:
            message = f"DPRNN: proj_size={proj_size}, but only an LSTM has projections. Use DPLSTM, or leave it at 0."
            raise UnsupportedModelError(message)
        nn.RNN.__init__(
            self, input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional
        )


class DPLSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell``, also on the first rows of a state."""

    def forward(
        self,
        input: Tensor,  # noqa: A002
        hx: tuple[Tensor, Tensor] | None = None,
        batch_size_t: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one step.

        Args:
            input: Shape ``(B, features)``.
            hx: Hidden and cell state, ``(B, H)`` each; zeros where there are none.
            batch_size_t: How many of the states' first rows take part; all where not given.

        Returns:
            The new states.
        """
        if hx is not None and batch_size_t is not None:
            hx = (hx[0][:batch_size_t], hx[1][:batch_size_t])
        return super().forward(input, hx)


class _TakesBatchSize:
    """Lets a step be taken with the first rows of a state only, as Opacus does for packed sequences."""

    def forward(
        self,
        input: Tensor,  # noqa: A002
        hx: Tensor | None = None,
        batch_size_t: int | None = None,
    ) -> Tensor:
        """Run one step.

        Args:
            input: Shape ``(B, features)``.
            hx: The state, ``(B, H)``; zeros where there is none.
            batch_size_t: How many of the state's first rows take part; all where not given.

        Returns:
            The new state.
        """
        forward: Any = super().forward  # type: ignore[misc]
        state: Tensor = forward(input, hx if hx is None or batch_size_t is None else hx[:batch_size_t])
        return state


class DPGRUCell(_TakesBatchSize, nn.GRUCell):
    """``torch.nn.GRUCell``, also on the first rows of a state."""


class DPRNNCell(_TakesBatchSize, nn.RNNCell):
    """``torch.nn.RNNCell``, also on the first rows of a state."""
