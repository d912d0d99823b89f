"""Axes that hold samples: those that are shorter or longer for another number of samples.

A forward that is proved runs first without gradients on a few samples of the batch, or one more (see
`ghostclip.evidence.batches`). Each torch function then knows the shapes of its arguments for N samples, and the forward
itself those for B: an axis that differs holds samples, a tensor that does not is a constant. Values play no part, so
that rounding does not. Calls are told apart by their function, its number, and the call they happen in; where two
forwards do not run alike, nothing is known.

Shape letters: B samples of the batch, N of the other forward.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from ghostclip import _torch, _tree

# In the place of an axis: the tensor is the same for any number of samples; its rows were selected, or several axes
# differ.
CONSTANT: Final = -1
UNKNOWN: Final = -2
# Which function, for which time, and the call around it.
Key = tuple[Any, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallLayout:
    """Where samples lie in the tensors of one call."""

    inputs: tuple[int, ...]  # for every tensor among the arguments, in order, an axis, `CONSTANT` or `UNKNOWN`
    outputs: tuple[int, ...] = ()  # the same for the results
    resized: Shapes = ()  # shapes of the arguments for N samples
    size: int = 0  # N


class Calls:
    """The calls of one forward, numbered."""

    def __init__(self) -> None:
        self._around: Key = ()
        self._counts: defaultdict[Key, int] = defaultdict(int)

    def key(self, func: Callable[..., Any]) -> Key:
        """Return the key of the next call of a function."""
        self._counts[self._around, func] += 1
        return self._around, func, self._counts[self._around, func]

    @contextmanager
    def inside(self, key: Key) -> Iterator[None]:
        """Yield while calls happen inside another one."""
        before, self._around = self._around, key
        try:
            yield
        finally:
            self._around = before


@dataclass(frozen=True)
class Resized:
    """A forward with another number of samples."""

    calls: Mapping[Key, tuple[Shapes, Shapes]]  # shapes of the arguments and of the results of every call
    outputs: Shapes  # shapes of the model's outputs
    batch_size: int  # B
    size: int  # N, another number

    def layout(self, key: Key, shapes: Shapes) -> CallLayout | None:
        """Return where samples lie in a call of the forward itself; None where it has no counterpart."""
        recorded = self.calls.get(key)
        axes = None if recorded is None else self.compared(shapes, recorded[0])
        return None if axes is None or recorded is None else CallLayout(axes, (), recorded[0], self.size)

    def of_results(self, key: Key, shapes: Shapes) -> tuple[int, ...]:
        """Return the axis of samples in each tensor that a call of the forward itself returned; empty where unknown."""
        recorded = self.calls.get(key)
        return (None if recorded is None else self.compared(shapes, recorded[1])) or ()

    def compared(self, shapes: Shapes, resized: Shapes) -> tuple[int, ...] | None:
        """Compare shapes of the forward itself with those of this one."""
        return compared(shapes, resized, self.batch_size, self.size)


def shapes_of(tree: Any) -> Shapes:
    """Return the shapes of the tensors of a tree, in order."""
    return tuple([_shape(tensor) for tensor in _tree.tensors(tree)])


def _shape(tensor: Tensor) -> tuple[int, ...]:
    with _torch.overrides_off():
        return tuple(tensor.shape)


def compared(shapes: Shapes, resized: Shapes, batch_size: int, size: int) -> tuple[int, ...] | None:
    """Return the axis of samples in each shape, `CONSTANT` or `UNKNOWN`; None where the shapes are not alike."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in resized]:
        return None
    return tuple([_axis(*pair, batch_size, size) for pair in zip(shapes, resized, strict=True)])


def _axis(shape: tuple[int, ...], resized: tuple[int, ...], batch_size: int, size: int) -> int:
    axes = [axis for axis, length in enumerate(shape) if resized[axis] != length]
    if not axes:
        return CONSTANT
    (axis, *others) = axes
    fits = not others and shape[axis] > 0 and shape[axis] * size == resized[axis] * batch_size
    return axis if fits and shape[axis] % batch_size == 0 else UNKNOWN
