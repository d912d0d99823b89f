"""Random numbers of a forward: the generators' states, the same numbers once more, and forwards without dropout.

A look at a model draws no numbers for what zeroes activations by chance. Dropout treats every element by itself, so
that a forward without it shows as well which samples follow which. One that draws no random numbers, or such as are
alike for all samples, can be held against a forward of fewer samples, or of samples in other places.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
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
# They have no generator of their own.
_WITHOUT: Final = frozenset({"cpu", "meta"})


class WithoutDropout(TorchFunctionMode):
    """Turns torch's dropout off, in whatever layer or function it is an argument of."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any function, without dropout."""
        kwargs = kwargs or {}
        off = _of_recurrent(args) if func in _RECURRENT else _FUNCTIONS.get(func)
        if off is not None:
            name, position, value = off
            if position < len(args):
                args = (*args[:position], value, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return func(*args, **kwargs)

    @contextmanager
    def behind(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """Turn dropout off in a backward too: activation checkpointing runs parts of the forward again there."""
        # Autograd runs every node of the graph without the modes of the code that called it.

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


class Randomness:
    """The states of all global generators at one moment: torch's (CPU and devices in use), Python's and NumPy's."""

    def __init__(self, tensors: Iterable[Tensor], *, only_torch: bool = False) -> None:
        # `tensors`: on the devices in use. `only_torch` leaves out Python's and NumPy's, which take far longer to read
        # and to write.
        devices = {tensor.device for tensor in tensors if tensor.device.type not in _WITHOUT}
        self._generators = [_generator_of(device) for device in sorted(devices, key=str)]
        self._generators.append((torch.get_rng_state, torch.set_rng_state))
        self._of_torch = len(self._generators)
        if not only_torch:
            self._generators.append((random.getstate, random.setstate))
        if not only_torch and "numpy" in sys.modules:
            legacy = sys.modules["numpy"].random
            self._generators.append((lambda: legacy.get_state(legacy=False), legacy.set_state))
        self._states = [read() for read, _ in self._generators]

    def restore(self) -> None:
        """Put every generator back."""
        for (_, write), state in zip(self._generators, self._states, strict=True):
            write(state)

    def drawn(self, *, outside: bool = False) -> bool:
        """Return whether a number was drawn since; ``outside``: by Python's or NumPy's generator."""
        pairs = list(zip(self._generators, self._states, strict=True))[self._of_torch if outside else 0 :]
        return any(not _same(read(), state) for (read, _), state in pairs)


def _generator_of(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return what reads and what writes the state of a device's default generator."""
    module: Any = torch.get_device_module(device)
    if device.index is None:
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return bool((one == two).all()) if hasattr(one, "all") else bool(one == two)


@contextmanager
def unnoticed(tensors: Iterable[Tensor]) -> Iterator[Randomness]:
    """Run a model for a look at it: afterwards every generator is where it was, and nothing was said."""
    # Yields the states of the generators before.
    before = Randomness(tensors)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield before
    finally:
        before.restore()
        # Weights that were cast for autocast here are not in any graph: the next forward must not find them.
        torch.clear_autocast_cache()


# They draw each entry by itself, alike for all, in the place of a tensor's values or for one like it.
_EACH_ALIKE: Final = frozenset(
    {"normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
    | {"rand_like", "randn_like", "randint_like"}
)


class AlikeDraws(_torch.DispatchMode):
    """Lets every sample meet the same random numbers, wherever it stands and however many there are."""

    # Those of one row are drawn, and repeated along the first axis and that of the samples.
    def __init__(self, axis: int) -> None:
        super().__init__()
        self._axes = 0, axis
        self.shapes: list[Any] = []  # operations that drew, and the shapes of what they returned, in order
        self.seen: list[Any] = []  # what was drawn for one row, in order; what is not known is equal to nothing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation, with numbers that are repeated if it draws some."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        named = _torch.arguments_by_name(func, args, kwargs or {})
        if 0 in (named.get("dropout_p"), named.get("dropout")):
            # Attention and recurrent layers without dropout, which are marked as well.
            return func(*args, **(kwargs or {}))
        drawn = None if named.get("generator") else self._drawn(func, named, named.get("self"))
        if drawn is None:
            self.seen.append(object())
            result = func(*args, **(kwargs or {}))
        else:
            result = named["self"].copy_(drawn) if func.overloadpacket.__name__.endswith("_") else drawn
        self.shapes.append((func, [tuple(tensor.shape) for tensor in _tree.tensors(result)]))
        return result

    def _drawn(self, func: Any, named: Mapping[str, Any], given: Any) -> Tensor | None:
        """Draw numbers that are alike for all samples; None where that is not known."""
        name = func.overloadpacket.__name__
        if name in ("bernoulli", "bernoulli_"):
            # Nothing is dropped that need not be, as in `WithoutDropout`.
            return torch.ones_like(given) * (named.get("p", given) > 0)
        by_size = "size" in named
        if not by_size and name not in _EACH_ALIKE:
            return None
        shape = list(named["size"] if by_size else given.shape)
        sizes = [1 if axis in self._axes else size for axis, size in enumerate(shape)]
        self.seen.append((func, sizes))
        row = func(**{**named, **({"size": sizes} if by_size else {"self": given.new_empty(sizes)})})
        return row.expand(shape).clone()
