"""Call sites: where parameters are consumed, and what the evidence has shown about each."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ghostclip.capture.broadcast import is_elementwise
from ghostclip.capture.derive import spread_over
from ghostclip.capture.growth import CONSTANT, UNKNOWN, Key, Layout, Shapes, tensors_in
from ghostclip.capture.inputs import in_backward
from ghostclip.capture.operation import Operation
from ghostclip.capture.reorder import DOUBTFUL
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.capture.usage import Site

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """Where samples lie in the arguments of an operation.

    Attributes:
        place: The operation's parameters, the number of axes of its tensors, and the number of the call.
        axes: An axis, `CONSTANT` or `UNKNOWN`, by the number (``id``) of the tensor; empty where nothing is known.
        grown: Shapes of its tensors for one sample more, where they are known.
        call: The call, as a grown forward tells calls apart.
        result: The axis of what it returns that holds samples, where its arguments tell.
    """

    place: Any
    axes: Mapping[int, int] = field(default_factory=dict)
    grown: Shapes = ()
    call: Key = ()
    result: int = UNKNOWN

    def axis(self, tensor: Tensor) -> int:
        """Return the axis of a tensor that holds samples, `CONSTANT` or `UNKNOWN`."""
        return self.axes.get(id(tensor), UNKNOWN)


class Sites:
    """What a session remembers from forward to forward.

    Attributes:
        table: Every call site seen so far.
        layouts: Where samples lie in the arguments of operations, as grown forwards have shown.
        outputs: The same for the model's outputs.
    """

    def __init__(self, session: "Session") -> None:
        """Start with nothing seen.

        Args:
            session: Whose forwards they belong to.
        """
        self.table: dict[Any, Site] = {}
        self.layouts: dict[Any, Layout] = {}
        self.outputs: tuple[int, ...] = ()
        self._session = session
        self._told: set[tuple[str, ...]] = set()

    def forget(self) -> None:
        """Ask for all evidence anew: the model was changed."""
        self.table.clear()
        self.layouts.clear()
        self.outputs = ()

    def read(self, operation: Operation) -> Reading:
        """Tell where samples lie in the arguments of an operation, as far as shapes have shown it.

        Args:
            operation: The operation.

        Returns:
            What is known of them.
        """
        session = self._session
        record, key = session.record, key_of(operation.tracked, operation.name)
        tree = operation.args, operation.kwargs
        tensors = tensors_in(tree)
        dims = tuple([tensor.dim() for tensor in tensors])
        # What checkpointing runs again must run as it did, and its calls come in another order.
        visit = 1
        if not in_backward():
            record.visits["call", key] += 1
            visit = record.visits["call", key]
        place = key, dims, visit
        if record.batch_size < 2:
            return Reading(place)
        layout = session.watch.layout(tree)
        if layout is not None:
            self.layouts[place] = layout
        else:
            layout = self.layouts.get(place) or self.layouts.get((key, dims, 1))
            record.guessed = record.guessed or place not in self.layouts
        if layout is None:
            return Reading(place, call=session.watch.key)
        axes = {id(tensor): axis for tensor, axis in zip(tensors, layout.inputs, strict=True)}
        return Reading(place, axes, layout.grown, session.watch.key)

    def is_data(self, tensor: Tensor, reading: Reading, name: str) -> bool:
        """Tell data from constants.

        Args:
            tensor: A tensor among an operation's arguments.
            reading: What is known of them.
            name: The operation.

        Returns:
            Whether it carries rows of samples (as against a mask or a table).
        """
        record, known = self._session.record, reading.axis(tensor)
        if tensor.requires_grad:
            return True
        rows = self._session.watch.rows_of(tensor)
        if rows is not None and rows is not DOUBTFUL:
            return True
        if rows is DOUBTFUL and record.batch_size > 1:
            # Whatever it is taken for, what one forward shows of it says nothing about the next.
            record.unproven = record.reordered = True
        size, axis = record.batch_size, record.axis
        if known != UNKNOWN:
            return known != CONSTANT
        if tensor.dim() == 0 or size == 0:
            return False
        if size == 1 or tensor.shape[0] == size or (axis < tensor.dim() and tensor.shape[axis] == size):
            return True
        # Where no shapes were asked for (probe=False), or the model runs with no other number of samples.
        return not self.layouts and tensor.dim() > 1 and tensor.shape[0] % size == 0 and not is_elementwise(name)

    def own_axis(self, tracked: TrackedTensor, reading: Reading) -> int:
        """Return the axis along which a tracked tensor has copies of a parameter for each sample.

        Args:
            tracked: The tensor.
            reading: What is known of the operation's arguments.

        Returns:
            The axis; `CONSTANT` where there is none.
        """
        record, known = self._session.record, reading.axis(tracked)
        if record.batch_size < 2:
            return CONSTANT
        if known >= 0:
            return known
        guessed = known == UNKNOWN and spread_over(tracked, record.batch_size, record.axis)
        return record.axis if guessed else CONSTANT

    def results(self, reading: Reading, result: Any) -> tuple[int, ...]:
        """Return where samples lie in what an operation returned; empty where that is not known.

        Args:
            reading: Its arguments.
            result: What it returned.

        Returns:
            One axis a tensor.
        """
        axes = self._session.watch.of_results(reading.call, result)
        layout = self.layouts.get(reading.place)
        if axes and layout is not None:
            self.layouts[reading.place] = replace(layout, outputs=axes)
        return axes or (() if layout is None else layout.outputs)

    def at(
        self,
        tracked: Iterable[TrackedTensor],
        name: str,
        form: str,
        *,
        routed: str = "",
    ) -> Site:
        """Return the call site of an operation, made on first sight.

        Args:
            tracked: The tracked tensors it consumes.
            name: Its name.
            form: What its factors are, for the coverage table.
            routed: How rows seem to have been selected on the way to it, see `RowMap.routed`.

        Returns:
            The site; a layer called several times in a forward has one for each call, since layouts may differ, and
            what is consumed in another way than before has one of its own: its evidence says nothing about the other.
        """
        tracked = list(tracked)
        key = key_of(tracked, name)
        visits = self._session.record.visits
        visits[key] += 1
        numbered = (key, visits[key], form, routed)
        if numbered not in self.table:
            names = tuple(dict.fromkeys(leaf for t in tracked for leaf in t.origin.names))
            self.table[numbered] = Site(names, name)
        site = self.table[numbered]
        for t in tracked:
            shown = "dense" if form.startswith("outer") and t.origin.value.dim() < 2 else form
            site.forms.update(dict.fromkeys(t.origin.names, shown))
        return site

    def tell_slow(self, site: Site, describe: Callable[[str], str]) -> None:
        """Say once that a parameter has no rule.

        Args:
            site: Where it is consumed.
            describe: Names the module that owns a parameter.
        """
        if site.names not in self._told:
            self._told.add(site.names)
            place = describe(site.names[0])
            _log.warning("%s: %s has no rule; its per-sample gradients are formed one by one.", place, site.describe())


def key_of(tracked: Iterable[TrackedTensor], name: str) -> tuple[Any, ...]:
    """Return what tells an operation on parameters from others.

    Args:
        tracked: Its tracked arguments.
        name: Its name.

    Returns:
        The names of the parameters, and its own.
    """
    return tuple(t.origin.names for t in tracked), name
