"""Axes that hold samples: those that grow when the batch does.

A forward that is proved runs first without gradients on the batch with one sample repeated (see
`ghostclip.evidence.growth`). Each torch function then
knows the shapes of its arguments for B + 1 samples, and the forward itself those for B: an axis that has grown holds
samples, a tensor that has not is a constant. Values play no part, so that rounding does not. Calls are told apart by
their function, its number, and the call they happen in; where two forwards do not run alike, nothing is known.

Shape letter: B samples.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from ghostclip import _torch, _tree

# In the place of an axis: the tensor is the same for any number of samples; its rows were selected, or several axes
# have grown.
CONSTANT: Final = -1
UNKNOWN: Final = -2
# Which function, for which time, and the call around it.
Key = tuple[Any, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Where samples lie in the tensors of one call.

    Attributes:
        inputs: For every tensor among the arguments, in order, an axis, `CONSTANT` or `UNKNOWN`.
        outputs: The same for what the call returns.
        grown: Shapes of the arguments for B + 1 samples.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    grown: Shapes = ()


class Calls:
    """The calls of one forward, numbered."""

    def __init__(self) -> None:
        """Begin a forward."""
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
class Grown:
    """A forward with one sample more.

    Attributes:
        calls: Shapes of the arguments and of the results of every call.
        outputs: Shapes of the model's outputs.
        batch_size: B, without that sample.
    """

    calls: Mapping[Key, tuple[Shapes, Shapes]]
    outputs: Shapes
    batch_size: int

    def layout(self, key: Key, shapes: Shapes) -> Layout | None:
        """Compare a call of the forward itself.

        Args:
            key: The call.
            shapes: Shapes of the tensors among its arguments, in order.

        Returns:
            Where samples lie; None where it has no counterpart.
        """
        found = self.calls.get(key)
        axes = None if found is None else compared(shapes, found[0], self.batch_size)
        return None if axes is None or found is None else Layout(axes, (), found[0])

    def of_results(self, key: Key, shapes: Shapes) -> tuple[int, ...]:
        """Compare what a call of the forward itself returned.

        Args:
            key: The call.
            shapes: Shapes of the tensors that it returned, in order.

        Returns:
            Where samples lie in them; empty where that cannot be told.
        """
        found = self.calls.get(key)
        return (None if found is None else compared(shapes, found[1], self.batch_size)) or ()


def shapes_of(tree: Any) -> Shapes:
    """Return the shapes of the tensors of a tree, in order."""
    return tuple([_shape(tensor) for tensor in _tree.tensors(tree)])


def _shape(tensor: Tensor) -> tuple[int, ...]:
    with _torch.overrides_off():
        return tuple(tensor.shape)


def compared(shapes: Shapes, grown: Shapes, batch_size: int) -> tuple[int, ...] | None:
    """Compare shapes for B samples and for one more.

    Args:
        shapes: For B samples.
        grown: For B + 1.
        batch_size: B.

    Returns:
        For each of them the axis that holds samples, `CONSTANT` or `UNKNOWN`; None where they are not alike.
    """
    if [len(shape) for shape in shapes] != [len(shape) for shape in grown]:
        return None
    return tuple([_axis(*pair, batch_size) for pair in zip(shapes, grown, strict=True)])


def _axis(shape: tuple[int, ...], grown: tuple[int, ...], batch_size: int) -> int:
    axes = [axis for axis, size in enumerate(shape) if grown[axis] != size]
    if not axes:
        return CONSTANT
    (axis, *others) = axes
    fits = not others and shape[axis] > 0 and shape[axis] * (batch_size + 1) == grown[axis] * batch_size
    return axis if fits and shape[axis] % batch_size == 0 else UNKNOWN
