"""Plans: the ways in which an operation on tracked tensors runs. `ghostclip.capture.decide` chooses one.

A plan holds what was decided and runs it; whatever it does to its forward is to register uses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from ghostclip.capture import broadcast
from ghostclip.capture.call_sites import OperationForm
from ghostclip.capture.derive import derive, write
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.general import in_general
from ghostclip.capture.layouts import ArgumentLayout
from ghostclip.capture.nodes import source
from ghostclip.capture.param_use import ParamUse, attached, delivery, register, run_and_save, site_of, versions_of
from ghostclip.capture.row_maps import RowMap, wants_gradient
from ghostclip.capture.sample_axis import ROWS_KEY, note
from ghostclip.capture.tracked import Operation, TrackedTensor
from ghostclip.errors import BatchAxisError
from ghostclip.factors import Factor
from ghostclip.rules import Captured


class Plan(Protocol):
    """How one operation runs."""

    def run(self, forward: ForwardContext) -> Any:
        """Run the operation; the result is tracked where it was computed from parameters alone, else in the graph."""


@dataclass(frozen=True, eq=False)
class Derive(Plan):
    """Parameters and constants alone: the result is tracked."""

    operation: Operation

    def run(self, forward: ForwardContext) -> Any:
        return derive(self.operation.func, self.operation.name, self.operation.args, self.operation.kwargs)


@dataclass(frozen=True, eq=False)
class Write(Plan):
    """The same in place."""

    operation: Operation

    def run(self, forward: ForwardContext) -> Any:
        return write(self.operation, forward.around.buffers())


@dataclass(frozen=True, eq=False)
class Inside(Plan):
    """The same computation in another form: operations of its own, which are intercepted, or one on plain values."""

    call: Callable[[], Any]

    def run(self, forward: ForwardContext) -> Any:
        return self.call()


@dataclass(eq=False, slots=True)
class ByRule(Plan):
    """A registered rule: factors are formed from the saved input and the gradient."""

    name: str
    targets: dict[str, TrackedTensor]  # the tracked arguments by the rule's names
    captured: Captured  # the rule's result; of a plan that is used again, made of another call
    rows: Tensor  # the data that it consumes them with
    saved: tuple[Tensor, ...]  # tensors that the backward needs
    sizes: tuple[int, ...]  # sizes of the leading axes of the rows
    maps: list[RowMap]  # how rows may map to samples, the preferred one first
    known: int  # axis of the rows that has samples, as far as it is known
    call: Callable[[], Tensor]  # runs it on detached parameters
    alike: OperationForm | None = None  # see `ParamUse`

    def use_in(self, forward: ForwardContext) -> ParamUse:
        """Return the use of its parameters, not registered yet."""
        gathering = self.maps[0].gathering
        site = site_of(forward, self.targets.values(), self.name, self.captured.form, gathering)
        captured, wanted = self.captured, wants_gradient([self.rows], forward)
        factors, dims, behind = captured.factors, captured.num_batch_dims, self.rows.grad_fn
        return ParamUse(
            site, forward, self.targets, factors, dims, self.maps, None, behind, self.sizes, wanted, self.alike,
            versions_of(self.targets), captured.order,
        )  # fmt: skip

    def carry_out(self, use: ParamUse) -> Tensor:
        """Run the operation with a use of its parameters; the result is in the graph."""
        output = run_and_save(use, self.call, self.saved, product=self.is_product)
        return attached(use, output, rows=self.rows, hook=delivery(use) if use.order else use.arrive)

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices."""
        return self.captured.form.startswith("outer product")

    def run(self, forward: ForwardContext) -> Tensor:
        return self.carry_out(self.use_in(forward))


@dataclass(frozen=True, eq=False)
class Broadcast(Plan):
    """Broadcasting over the batch: every tracked argument is expanded, and gets a gradient per row."""

    operation: Operation
    dims: int  # number of axes of its result
    rows: broadcast.RowAxis  # axis of its result along which rows of samples lie
    witness: Tensor  # the data that shows it

    def run(self, forward: ForwardContext) -> Any:
        wanted, behind = wants_gradient([self.witness], forward), self.witness.grad_fn

        def enter(tracked: TrackedTensor) -> Tensor:
            expanded = broadcast.Expanded(tracked.origin.value, self.dims, self.rows)
            return _entered(self.operation.name, tracked, expanded, forward, behind=behind, wants_gradient=wanted)

        return self.operation.run(enter)


@dataclass(frozen=True, eq=False)
class PerSampleCopies(Plan):
    """Tensors that already have a copy of a parameter for each sample: they enter any operation as they are."""

    operation: Operation
    axes: Mapping[int, int]  # axis of the copies, by `id` of the tracked tensor

    def run(self, forward: ForwardContext) -> Any:
        size = forward.batch_size

        def enter(tracked: TrackedTensor) -> Tensor:
            value, axis = tracked.origin.value, self.axes[id(tracked)]
            maps = broadcast.map_of_rows(value.shape[axis], size, forward.batch_axis, None)
            rows = broadcast.RowAxis(axis, value.shape[axis], maps, size)
            expanded = broadcast.Expanded(value, value.dim(), rows)
            return _entered(self.operation.name, tracked, expanded, forward, behind=None, wants_gradient=True)

        return self.operation.run(enter)


@dataclass(frozen=True, eq=False)
class General(Plan):
    """The general way: the operation's own backward, sample by sample."""

    operation: Operation
    layout: ArgumentLayout

    def run(self, forward: ForwardContext) -> Any:
        try:
            return in_general(self.operation, self.layout, forward)
        except BatchAxisError:
            if self.operation.is_in_graph or self.operation.is_in_place:
                raise
            # As many entries as samples, and no room for samples in the result: a constant as well.
            return Derive(self.operation).run(forward)


def _entered(
    name: str,
    tracked: TrackedTensor,
    expanded: broadcast.Expanded,
    forward: ForwardContext,
    *,
    behind: Any,
    wants_gradient: bool,
) -> Tensor:
    """Return an expanded parameter as a node of the graph, with a use of its own."""
    maps = [replace(row_map, axis=expanded.row_axis) for row_map in expanded.rows.maps]
    site = site_of(forward, [tracked], name, "dense", maps[0].gathering)

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
        return {"value": expanded.factor(grad, use.row_map)}

    targets = {"value": tracked}
    use = ParamUse(site, forward, targets, factors, expanded.row_axis + 1, maps, versions=versions_of(targets))
    use.wants_input_gradient = wants_gradient
    entered = source(expanded.tensor, forward.around.anchor)
    register(use, entered.grad_fn, behind)
    rows = None if maps[0].is_guessed and len(maps) > 1 else maps[0].sample_axis(entered.shape, forward.batch_size)
    if rows is not None:
        # What data outside the graph that it meets cannot say.
        note(entered.grad_fn, ROWS_KEY, rows if rows.axis < 0 else rows._replace(axis=expanded.row_axis))
    entered.register_hook(use.arrive)
    return entered
