"""Axes that hold samples: those that grow when the batch does.

A forward that is proved runs first without gradients on the batch with one sample repeated. Each torch function then
knows the shapes of its arguments for B + 1 samples, and the forward itself those for B: an axis that has grown holds
samples, a tensor that has not is a constant. Values play no part, so that rounding does not. Calls are told apart by
their function, its number, and the call they happen in; where two forwards do not run alike, nothing is known.

Shape letter: B samples.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _torch
from ghostclip.capture.decompose import inside_of
from ghostclip.capture.dropout import WithoutDropout
from ghostclip.capture.mixing import batch_axis_of, restored_buffers
from ghostclip.capture.randomness import unnoticed
from ghostclip.rules.registry import operation_name

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


class _Recorder(TorchFunctionMode):
    """Notes the shapes of every call's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.found = Calls(), dict[Key, tuple[Shapes, Shapes]]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key, before = self.calls.key(func), shapes_of((args, kwargs))
        around = key[0]
        inside = None if around and around[1] is func else inside_of(func, operation_name(func))
        if inside is None:
            result = func(*args, **kwargs)
        else:
            # Layers written out refuse parameters whose gradient nobody would take.
            args, kwargs = _torch.tree_map(
                lambda item: item.detach() if isinstance(item, Tensor) else item, (args, kwargs)
            )
            with self.calls.inside(key), self:
                result = inside(*args, **kwargs)
        self.found[key] = before, shapes_of(result)
        return result


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
    """Return the shapes of the tensors in nested tuples, lists and dicts, in order."""
    return tuple([_shape(tensor) for tensor in tensors_in(tree)])


def _shape(tensor: Tensor) -> tuple[int, ...]:
    with _torch.overrides_off():
        return tuple(tensor.shape)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            pending += reversed(item)
        elif isinstance(item, dict):
            pending += reversed(item.values())
    return found


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


def grown(
    model: nn.Module, run: Callable[[Any], Sequence[Tensor]], inputs: Any, *, batch_size: int, axis: int
) -> Grown | None:
    """Run a model on a batch with one sample repeated.

    Args:
        model: The model; its buffers and all random states are put back.
        run: Runs it on inputs and returns its output tensors.
        inputs: What it is called with.
        batch_size: B.
        axis: The expected batch axis.

    Returns:
        What it did; None where it does not run with B + 1 samples.
    """
    more = _torch.tree_map(lambda leaf: _with_one_more(leaf, batch_size, axis), inputs)
    used = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    # With gradients where it raises without: it may differentiate within its forward.
    for gradients in (False, True):
        recorder = _Recorder()
        try:
            with restored_buffers(model), unnoticed(used), torch.set_grad_enabled(gradients):
                with WithoutDropout(), recorder:
                    outputs = run(more)
            return Grown(recorder.found, shapes_of(list(outputs)), batch_size)
        except Exception:  # noqa: BLE001 - what it does on another batch is no reason to refuse this one
            continue
    return None


def _with_one_more(leaf: Any, batch_size: int, axis: int) -> Any:
    place = batch_axis_of(leaf, batch_size=batch_size, axis=axis)
    if place is None:
        return leaf
    index = torch.arange(batch_size + 1, device=leaf.device).clamp(max=batch_size - 1)
    return leaf.detach().index_select(place, index).requires_grad_(leaf.requires_grad)
