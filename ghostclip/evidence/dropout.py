"""Forwards without dropout: a look at a model draws no numbers for what zeroes activations by chance.

Dropout treats every element by itself, so that a forward without it shows as well which samples follow which; and one
that draws no random numbers can be held against a forward of fewer samples.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ghostclip.capture.nodes import edge_of, nodes_behind

# What turns dropout off: the name of an argument, its place, and the value.
_Off = tuple[str, int, Any]
_NO_TRAINING: Final[_Off] = ("training", 2, False)
_NO_TRAIN: Final[_Off] = ("train", 2, False)
_FUNCTIONS: Final[dict[Callable[..., Any], _Off]] = {
    functional.dropout: _NO_TRAINING,
    functional.dropout1d: _NO_TRAINING,
    functional.dropout2d: _NO_TRAINING,
    functional.dropout3d: _NO_TRAINING,
    functional.alpha_dropout: _NO_TRAINING,
    functional.feature_alpha_dropout: _NO_TRAINING,
    functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    functional.multi_head_attention_forward: ("dropout_p", 10, 0.0),
    torch.dropout: _NO_TRAIN,
    torch.dropout_: _NO_TRAIN,
    torch.feature_dropout: _NO_TRAIN,
    torch.feature_dropout_: _NO_TRAIN,
    torch.alpha_dropout: _NO_TRAIN,
    torch.alpha_dropout_: _NO_TRAIN,
    torch.feature_alpha_dropout: _NO_TRAIN,
    torch.feature_alpha_dropout_: _NO_TRAIN,
    torch.native_dropout: _NO_TRAIN,
}
_RECURRENT: Final = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class WithoutDropout(TorchFunctionMode):
    """Turns torch's dropout off, in whatever layer or function it is an argument of."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any function, without dropout."""
        kwargs = kwargs or {}
        off = _of_recurrent(args) if func in _RECURRENT else _FUNCTIONS.get(func)
        if off is not None:
            name, place, value = off
            if place < len(args):
                args = (*args[:place], value, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return func(*args, **kwargs)

    @contextmanager
    def behind(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """Turn dropout off in a backward too: activation checkpointing runs parts of the forward again there.

        Autograd runs every node of the graph without the modes of the code that called it.

        Args:
            roots: Where the backward starts.

        Yields:
            Nothing.
        """

        def enter(_: Any) -> None:
            self.__enter__()

        handles = [node.register_prehook(enter) for node in nodes_behind(edge_of(root)[0] for root in roots)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _of_recurrent(args: tuple[Any, ...]) -> _Off:
    """Return what turns off the dropout of a recurrent layer, whose sequences are packed if their sizes come second."""
    packed = len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    return "dropout", 6 if packed else 5, 0.0
