"""Other batches than the one that a model was called with: some of its samples, in other places, or copies of others.

The forward with another number of samples shows which axes hold samples: see `ghostclip.capture.sizes`.

Shape letter: B samples.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip.capture.rewrite import inside_of
from ghostclip.capture.row_maps import RowMap
from ghostclip.capture.sizes import Calls, Key, Resized, Shapes, shapes_of
from ghostclip.evidence.dependence import batch_axis_of, has_lists, taken, with_lists
from ghostclip.evidence.module_state import restored
from ghostclip.evidence.randomness import WithoutDropout, unnoticed
from ghostclip.rules.registry import operation_name

# So many samples show what lies behind a gate.
_FEW: Final = 3
# So many samples of a larger batch show which axes hold them.
_SHOW_AXES: Final = 3
# How many times as large loud samples are, on average.
_LOUDER: Final = 8.0


@dataclass(frozen=True)
class Batch:
    """What a forward was called with."""

    inputs: Any  # its positional and its keyword inputs
    size: int  # B, at least 2
    axis: int  # the expected batch axis
    gathered: bool = False  # whether rows were selected in it, so that data decides which random number a row meets
    # how the rows of each output map to samples, None where that is not known; empty where nothing is
    maps: Sequence[RowMap | None] = ()
    trained: frozenset[int] = frozenset()  # numbers of the outputs that need gradients and may hold rows of samples
    hands_on: bool = False  # whether another part of the model takes the outputs, be they numbers of whatever type
    outputs: Sequence[Tensor] = ()  # what the forward returned, where it drew no random numbers; else empty

    seed: int = 0  # another one for every proof
    again: bool = False  # whether the same way of the model was proved before
    autocast: torch.dtype | None = None  # what autocast computed with in that forward; None where it was off
    by_place: bool = False  # whether a list among the inputs may hold one value for each sample
    shared: bool = False  # whether ranks run the model together, equally often whatever each of them finds

    @property
    def drawn(self) -> list[int]:
        """One of every two neighbours, and the last sample if it has none; not the first, so that all change places."""
        numbers = random.Random(self.seed)
        pairs = range(2, self.size - 1, 2)
        return [1, *(first + numbers.randrange(2) for first in pairs), *([self.size - 1] if self.size % 2 else [])]

    @property
    def shuffled(self) -> list[int]:
        """Which sample stands at each place where all move, and the drawn ones give way to copies of one other."""
        rest = self.others(self.drawn)
        random.Random(self.seed).shuffle(rest)
        moved = dict(zip(rest, [*rest[1:], *rest[:1]], strict=True))
        return [moved.get(place, rest[0]) for place in range(self.size)]

    @property
    def replaced(self) -> list[list[int]]:
        """The sets of samples to replace, one after the other."""
        middle = (self.size + 1) // 2
        return [self.drawn, list(range(middle)), list(range(middle, self.size))]

    @property
    def apart(self) -> list[int]:
        """About half of the samples, to run by themselves, each in another place, as a share of the batch as well."""
        # Beside lists that go by places, and stay whole, the first ones.
        first = 0 if self.by_place else 1
        return list(range(first, first + (self.size + 1) // 2))

    @property
    def left(self) -> list[int]:
        """A few samples, which are also run by themselves where those of `apart` come out otherwise."""
        return self.apart if self.by_place else self.drawn[: max(2, self.size // 4)]

    @property
    def has_lists(self) -> bool:
        """Whether a list among the inputs has as many values as there are samples, and may hold one for each."""
        return has_lists(self.inputs, batch_size=self.size, axis=self.axis)

    @property
    def has_places(self) -> bool:
        """Whether an input without samples may hold something by their places, as flat patches and indices do."""
        lengths = ((leaf, len(leaf)) for leaf in _tree.tensors(self.inputs) if leaf.dim())
        return any(n > 1 and batch_axis_of(leaf, batch_size=self.size, axis=self.axis) is None for leaf, n in lengths)

    def others(self, samples: Sequence[int]) -> list[int]:
        """Return all other samples, in order."""
        return sorted(set(range(self.size)).difference(samples))

    def maps_of(self, outputs: Sequence[Tensor]) -> Sequence[RowMap | None]:
        """Return how the rows of each output map to samples, None where it is not known."""
        return self.maps if len(self.maps) == len(outputs) else [None] * len(outputs)

    def map_by_shape(self, output: Tensor) -> RowMap | None:
        """Return how the rows of an output map to samples by its shape alone."""
        # None where no axis has as many rows as there are samples, and for states ``(layers, B, ...)`` with as many
        # layers as samples.
        axis = batch_axis_of(output, batch_size=self.size, axis=self.axis)
        return None if axis is None or tuple(output.shape[:2]) == (self.size, self.size) else RowMap("axis", axis)

    def few(self, most: int = _FEW) -> "Batch":
        """Return the batch with a few of its samples; all of them where a list among the inputs may go by places."""
        # Not with as many as something has entries that all samples share, which would be taken for theirs.
        place_of = partial(batch_axis_of, batch_size=self.size, axis=self.axis)
        lengths = {length for leaf in _tree.tensors(self.inputs) if place_of(leaf) is None for length in leaf.shape}
        most = next(number for number in count(most) if number not in lengths)
        if self.size <= most or self.has_lists:
            return self
        order = list(range(most))
        known = [row_map and row_map.of_first(most) for row_map in self.maps]
        return replace(self, inputs=self.of_samples(order), size=most, maps=known, outputs=())

    def exchanged(self) -> list[Any]:
        """Return inputs with every sample replaced by another, and with other means over the batch."""
        # Of two samples that change places the mean stays the same.
        orders = [[1, 0], [1, 1]] if self.size == 2 else [[1, *[0] * (self.size - 1)]]
        return [self.of_samples(order) for order in orders]

    def copied(self, samples: Sequence[int]) -> Any:
        """Return the inputs with some samples replaced by copies of the nearest other one before them, or behind."""
        # Lengths in decreasing order stay in that order, as packing them demands.
        return self.of_samples(self.copies(samples))

    def louder(self, samples: Sequence[int], tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """Return a tensor with other and larger numbers for some samples; `like`: what has its axis for them."""
        axis = batch_axis_of(tensor if like is None else like, batch_size=self.size, axis=self.axis)
        if axis is None or not tensor.is_floating_point() or tensor.is_nested:
            return tensor
        # Not multiples of what they were, which norms of layers would undo.
        drawn = torch.rand(tensor.shape[-1], generator=torch.Generator().manual_seed(self.seed)) + 0.5
        places, factors = torch.tensor(samples, device=tensor.device), _LOUDER * drawn.to(tensor)
        rows = tensor.detach().index_select(axis, places) * (factors if axis < tensor.dim() - 1 else factors[0])
        return tensor.detach().index_copy(axis, places, rows).requires_grad_(tensor.requires_grad)

    def looked_up_louder(self, samples: Sequence[int], keys: set[Any], rows: Tensor, ids: Tensor) -> Tensor:
        """Return what was looked up by ids of the inputs, whose memory is known by its keys; by others as it is."""
        return self.louder(samples, rows, ids) if _torch.memory_key(ids) in keys else rows

    def copies(self, samples: Sequence[int]) -> list[int]:
        """Return which sample stands at each place where some are replaced."""
        rest = self.others(samples)
        fixed = set(rest)
        latest = accumulate(range(self.size), lambda last, sample: sample if sample in fixed else last, initial=rest[0])
        return list(latest)[1:]

    def with_lists(self, samples: Sequence[int]) -> Any:
        """Return the inputs of some samples, lists of one value for each of them taken along."""
        return with_lists(self.of_samples(samples), samples, batch_size=self.size, axis=self.axis)

    def of_samples(self, samples: Sequence[int], *, folded: bool = False) -> Any:
        """Return the inputs of some samples, those without B samples as they are; or `folded` ones taken along."""
        return taken(self.inputs, samples, batch_size=self.size, axis=self.axis, folded=folded)

    def zeros(self) -> Any:
        """Return the inputs with zeros for all samples."""
        place_of = partial(batch_axis_of, batch_size=self.size, axis=self.axis)
        copies = self.of_samples(range(self.size))
        return _tree.mapped(lambda leaf: leaf if place_of(leaf) is None else leaf * 0, copies)


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
            args, kwargs = _tree.mapped(
                lambda item: item.detach() if isinstance(item, Tensor) else item, (args, kwargs)
            )
            with self.calls.inside(key), self:
                result = inside(*args, **kwargs)
        self.found[key] = before, shapes_of(result)
        return result


def resized(
    model: nn.Module, run: Callable[[Any], Sequence[Tensor]], inputs: Any, *, batch_size: int, axis: int
) -> Resized | None:
    """Run a model on a few samples of a batch, or on one more: the last one repeated."""
    # Buffers and random states are put back. `run` runs the model on inputs and returns its output tensors. None where
    # it runs with no other number of samples.
    one_more = [*range(batch_size), batch_size - 1]
    orders = [one_more] if batch_size <= _SHOW_AXES else [list(range(_SHOW_AXES)), one_more]
    # Lists of as many values as samples may have one for each.
    batch = Batch(inputs, batch_size, axis)
    listed = (True, False) if batch.has_lists else (False,)
    used = [*model.parameters(), *model.buffers(), *_tree.tensors(inputs)]
    # With gradients where it raises without: it may differentiate within its forward.
    for gradients, order, with_values in product((False, True), orders, listed):
        altered, recorder = batch.with_lists(order) if with_values else batch.of_samples(order), _Recorder()
        try:
            with restored(model), unnoticed(used), torch.set_grad_enabled(gradients):
                with WithoutDropout(), recorder:
                    outputs = run(altered)
            return Resized(recorder.found, shapes_of(list(outputs)), batch_size, len(order))
        except Exception:  # noqa: BLE001 - what it does on another batch is no reason to refuse this one
            continue
    return None
