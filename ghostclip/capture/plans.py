"""Plans: the ways in which an operation on tracked tensors runs. `ghostclip.capture.decide` chooses one.

A plan holds what was decided and runs it; whatever it does to its forward is to register uses.

`General` is the way for whatever operation: a gradient for each sample through that operation alone. Each sample's rows
are run again on their own, all samples at once under ``vmap``: the work of one forward and one backward. What comes out
is used only if it reproduces the operation's output and adds up to the whole batch's gradient, which costs one more
backward. Where the rows cannot be told apart or the operation cannot be run so (a random one), autograd is asked for
one sample's gradient after the other, at the cost of B backwards through the operation.

Shape letter: B samples.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ghostclip import _torch, _tree
from ghostclip.capture.call_sites import AT_ONCE_FORM, GENERAL_FORM, OperationForm
from ghostclip.capture.derive import batched_grad, derive
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import InnerGraph, source
from ghostclip.capture.param_use import (
    ParamUse,
    attached,
    no_axis_message,
    register,
    run_and_save,
    site_of,
    versions_of,
)
from ghostclip.capture.row_maps import (
    ArgumentLayout,
    Expanded,
    RowAxis,
    RowMap,
    axis_maps,
    candidates,
    order_of_rows,
    per_sample_rows,
    result_axes,
    wants_gradient,
)
from ghostclip.capture.sample_axis import ROWS_KEY, leads_to, set_metadata
from ghostclip.capture.tracked import Operation, TrackedTensor
from ghostclip.errors import BatchAxisError
from ghostclip.factors import Dense, Factor
from ghostclip.rules import Captured

_FOLDED: Final = ("axis", "major", "minor")
# Relative differences beyond rounding, by dtype; sums over a batch in another order are within.
_TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Rerun:
    """An operation with its inputs in the forward, to be run again for all samples at once."""

    operation: Operation
    entered: dict[int, Tensor]  # its parameters in a graph of their own, by the number (``id``) of the tracked tensor
    plain: list[Tensor] = field(default_factory=list)  # its plain tensors, known once it has run
    # their versions then; data changed in place since cannot be run on again
    versions: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        """Its parameters."""
        return list(self.entered.values())

    def first(self, plain: Sequence[Tensor]) -> tuple[list[Any], _torch.TreeSpec]:
        """Run it as in the forward, and store the values on which it runs."""
        self.plain[:] = plain
        self.versions[:] = _torch.versions(plain)
        return self._run(plain, self.entered)

    def again(self, plain: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Run it on other values, and return its differentiable outputs."""
        items, _ = self._run(plain, dict(zip(self.entered, parameters, strict=True)))
        return [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]

    def _run(self, plain: Sequence[Tensor], entered: Mapping[int, Tensor]) -> tuple[list[Any], _torch.TreeSpec]:
        """Run it on local tensors: nothing upstream of its node is touched; return leaves of the result, and form."""
        leaves, structure = _torch.tree_flatten((self.operation.args, self.operation.kwargs))
        remaining = iter(plain)
        local = [next(remaining) if _is_plain(leaf) else entered.get(id(leaf), leaf) for leaf in leaves]
        args, kwargs = _torch.tree_unflatten(local, structure)
        return _torch.tree_flatten(self.operation.func(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Arrived:
    """One output with its gradient."""

    place: int  # index among the outputs
    output: Tensor  # with the operation's own graph
    grad: Tensor  # gradient of `output`
    row_map: RowMap  # where its samples are


def gradients(region: Rerun, arrived: Sequence[Arrived], *, batch_size: int) -> list[Tensor] | None:
    """Return per-sample gradients ``(B, *P)`` of an operation's parameters by vmap; None if a rerun differs."""
    # None if it cannot be rerun with the same result.
    if batch_size < 2 or any(item.row_map.kind not in _FOLDED for item in arrived):
        return None
    if _torch.versions(region.plain) != region.versions:
        return None
    maps = [_map_of(tensor, arrived, batch_size) for tensor in region.plain]
    try:
        with _torch.no_slow_vmap():
            outputs, sample_grads = _vmapped(region, arrived, maps, batch_size)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None
    same = all(
        _close(rerun, _split(item.output.detach(), item.row_map, batch_size))
        for rerun, item in zip(outputs, arrived, strict=True)
    )
    return sample_grads if same and _adds_up(region, arrived, sample_grads) else None


def _vmapped(
    region: Rerun, arrived: Sequence[Arrived], maps: Sequence[RowMap | None], batch_size: int
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Run the operation and its backward for all samples; return outputs and gradients, samples first."""
    plain = [
        tensor if row_map is None else _split(tensor, row_map, batch_size)
        for tensor, row_map in zip(region.plain, maps, strict=True)
    ]
    grads = [_split(item.grad, item.row_map, batch_size) for item in arrived]
    indices = [item.place for item in arrived]

    def one(rows: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        def forward(*parameters: Tensor) -> tuple[Tensor, ...]:
            outputs = region.again(rows, parameters)
            return tuple(outputs[index] for index in indices)

        outputs, pull = torch.func.vjp(forward, *region.inputs)[:2]
        return outputs, pull(tuple(grads))

    in_dims = ([None if row_map is None else 0 for row_map in maps], [0] * len(grads))
    outputs, sample_grads = torch.func.vmap(one, in_dims=in_dims, randomness="error")(plain, grads)
    return outputs, list(sample_grads)


def _split(tensor: Tensor, row_map: RowMap, batch_size: int) -> Tensor:
    """Return every sample's rows of a tensor, samples first, with the rows' axis: ``(B, ..., rows, ...)``."""
    axis, rows = row_map.axis, tensor.shape[row_map.axis] // batch_size
    if row_map.kind == "minor":
        return tensor.detach().unflatten(axis, (rows, batch_size)).movedim(axis + 1, 0)
    return tensor.detach().unflatten(axis, (batch_size, rows)).movedim(axis, 0)


def _map_of(tensor: Tensor, arrived: Sequence[Arrived], batch_size: int) -> RowMap | None:
    """Guess the row map of an input from the outputs'; None: a constant. What a wrong guess gives is not used."""
    for item in arrived:
        row_map = item.row_map
        size = item.output.shape[row_map.axis]
        for axis in dict.fromkeys((row_map.axis, 0, 1)):
            if axis < tensor.dim() and tensor.shape[axis] == size:
                return RowMap(row_map.kind, axis)
    if tensor.dim() and tensor.shape[0] == batch_size:
        return RowMap("axis")
    return None


def _close(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal within rounding, relative to the largest element."""
    if first.shape != second.shape:
        return False
    tolerance = _TOLERANCE.get(first.dtype, 5e-2)
    scale = float(second.abs().nan_to_num(0.0, 0.0, 0.0).max()) if second.numel() else 0.0
    return bool(torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def _adds_up(region: Rerun, arrived: Sequence[Arrived], sample_grads: Sequence[Tensor]) -> bool:
    """Return whether per-sample gradients add up to autograd's gradient of the batch."""
    outputs, grads = [item.output for item in arrived], [item.grad for item in arrived]
    whole = torch.autograd.grad(outputs, region.inputs, grads, retain_graph=True, materialize_grads=True)
    return all(_close(mine.sum(0), total) for mine, total in zip(sample_grads, whole, strict=True))


def in_general(operation: Operation, layout: ArgumentLayout, forward: ForwardContext) -> Any:
    """Run an operation without a rule as a node with a graph of its own, and register its use."""
    if operation.is_in_place:
        return _in_place(operation, layout, forward)
    tracked = operation.tracked
    entered = {id(t): t.origin.value.detach().requires_grad_() for t in tracked}
    rerun = Rerun(operation, entered)
    gathered = any(_gathered(tensor, forward) is not None for tensor in operation.plain if tensor.dim())
    site = site_of(forward, tracked, operation.name, GENERAL_FORM, "selected" if gathered else "")
    if site.at_once:
        site.forms.update(dict.fromkeys(site.names, AT_ONCE_FORM))
    targets = {str(number): t for number, t in enumerate(tracked)}
    # Rule and row maps are set when the gradient arrives: see `_delivery`.
    use = ParamUse(site, forward, targets, factors=_unset, num_batch_dims=1, maps=[], versions=versions_of(targets))
    use.wants_input_gradient = wants_gradient(operation.plain, forward)
    output_maps: list[list[RowMap]] = []  # filled at the end, once there are outputs
    ran: list[tuple[list[Any], _torch.TreeSpec]] = []

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        ran.append(rerun.first(tensors))
        return [item for item in ran[0][0] if _in_graph(item)]

    deliver = _delivery(use, rerun, output_maps)
    results = list(InnerGraph.apply(run, deliver, forward.around.anchor, *operation.plain))
    nodes = [tensor.grad_fn for tensor in operation.plain if tensor.grad_fn is not None]
    register(use, results[0].grad_fn if results else None, nodes[0] if nodes else None)
    fresh, ((items, structure),) = iter(results), ran
    leaves = [next(fresh) if _in_graph(item) else item for item in items]
    returned = _torch.tree_unflatten(leaves, structure)
    axes = dict(zip(map(id, _tree.tensors(returned)), result_axes(layout, returned, forward), strict=False))
    output_maps += [_output_maps(output, operation, use, axes.get(id(output), layout.result)) for output in results]
    return returned


def _gathered(tensor: Tensor, forward: ForwardContext) -> Tensor | None:
    """Return the sample of each gathered row of a tensor, and record in the forward that rows were gathered."""
    order = order_of_rows(tensor, 0, forward)
    order.record_in(forward)
    return order.samples


def _delivery(
    use: ParamUse, rerun: Rerun, output_maps: list[list[RowMap]]
) -> Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]:
    """Return the function that gets an operation's output gradients, and forms its factors from them."""
    around = use.forward.around

    def deliver(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        arrived = [
            Arrived(index, output, grad, maps[0])
            for index, (output, grad, maps) in enumerate(zip(outputs, grads, output_maps, strict=True))
            if grad is not None
        ]
        if not arrived:
            return
        # Evidence decides between the row maps of the first output that takes part.
        use.maps = output_maps[arrived[0].place]
        use.num_batch_dims = max(row_map.axis for row_map in use.maps) + 1

        def factors(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
            every = [replace(arrived[0], grad=grad, row_map=use.row_map), *arrived[1:]]
            at_once = _at_once(use, rerun, every)
            if at_once is not None:
                return at_once
            if use.forward.batch_size > 1:
                _warn_slow(use)
            return _one_by_one(every, rerun.inputs, use.forward.batch_size)

        use.factors = factors
        around.deliver(use, arrived[0].grad)
        # The closure holds the local graph and the use holds the closure: without this, both wait for the collector.
        use.factors = _unset

    return deliver


def _at_once(use: ParamUse, rerun: Rerun, arrived: Sequence[Arrived]) -> Mapping[str, Factor] | None:
    """Return the factors of all samples by one vmapped rerun; None where that is not exact."""
    sample_grads = gradients(rerun, arrived, batch_size=use.forward.batch_size)
    if sample_grads is None:
        return None
    use.site.at_once = True
    use.site.forms.update(dict.fromkeys(use.site.names, AT_ONCE_FORM))
    return {str(number): Dense(grad) for number, grad in enumerate(sample_grads)}


def _warn_slow(use: ParamUse) -> None:
    """Warn, once for a parameter, that it has no rule."""
    site, around = use.site, use.forward.around
    if site.names not in around.sites.told:
        around.sites.told.add(site.names)
        said = "%s: %s has no rule; its per-sample gradients are formed one by one."
        _log.warning(said, around.describe(site.names[0]), site.describe())


def _in_place(operation: Operation, layout: ArgumentLayout, forward: ForwardContext) -> Any:
    """Run an in-place operation on a copy of its first argument, then write the result back."""
    changed = operation.args[0]

    def on_copy(first: Tensor, *rest: Any, **named: Any) -> Tensor:
        copy = first.clone()
        operation.func(copy, *rest, **named)
        return copy

    on_copies = replace(operation, func=on_copy, name=f"copied {operation.name.strip('_')}")
    # It has the form of what is changed.
    changed.copy_(in_general(on_copies, replace(layout, result=layout.axis(changed)), forward))
    return None if operation.name == "__setitem__" else changed


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, TrackedTensor)


def _in_graph(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad


def _unset(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
    raise AssertionError("set when the gradient arrives")


def _output_maps(output: Tensor, operation: Operation, use: ParamUse, known: int) -> list[RowMap]:
    """Return the row maps possible for an output of an operation without a rule; refuse one without any."""
    forward = use.forward
    maps = candidates(output.shape, forward.batch_size, axis=forward.batch_axis) if output.dim() else []
    if forward.batch_size > 1 and known >= 0:
        maps = [row_map for row_map in maps if row_map.axis == known]
    if forward.batch_size > 1 and output.dim() and known <= 0:
        for tensor in operation.plain:
            if tensor.dim() and tensor.shape[0] == output.shape[0]:
                samples = _gathered(tensor, forward)
                if samples is not None:
                    return [RowMap("gathered", 0, samples), *maps]
    if not maps and output.numel():
        raise BatchAxisError(no_axis_message(use.site, output, forward))
    # Rows that there are none of are nobody's: the first axis holds them, or another.
    return maps or [RowMap("gathered", output.shape.index(0), torch.zeros(0, dtype=torch.int64, device=output.device))]


def _one_by_one(arrived: Sequence[Arrived], inputs: Sequence[Tensor], batch_size: int) -> Mapping[str, Factor]:
    """Return per-sample gradients of ``inputs`` by masking the output gradient to one sample at a time."""
    totals: dict[int, Tensor] = {}
    for item in arrived:
        row_map = item.row_map
        if row_map.kind == "whole":
            masked_B = item.grad.unsqueeze(0)
        else:
            moved = per_sample_rows(item.grad.movedim(row_map.axis, 0), row_map, batch_size)
            masked_B = moved.movedim(1, row_map.axis + 1)
        for number, grad_B in enumerate(batched_grad(item.output, inputs, masked_B)):
            if grad_B is not None:
                totals[number] = totals[number] + grad_B if number in totals else grad_B
    return {str(number): Dense(total) for number, total in totals.items()}


class Plan(Protocol):
    """How one operation runs."""

    def run(self, forward: ForwardContext) -> Any:
        """Run the operation; the result is tracked where it was computed from parameters alone, else in the graph."""


@dataclass(frozen=True, eq=False)
class Direct(Plan):
    """Nothing is captured here: parameters and constants alone, plain values, or operations that are intercepted."""

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
        anchored = leads_to(self.rows, use.forward.around.anchor)
        return attached(use, output, behind=self.rows.grad_fn, anchored=anchored)

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
    rows: RowAxis  # axis of its result along which rows of samples lie
    witness: Tensor  # the data that shows it

    def run(self, forward: ForwardContext) -> Any:
        wanted, behind = wants_gradient([self.witness], forward), self.witness.grad_fn

        def enter(tracked: TrackedTensor) -> Tensor:
            expanded = Expanded(tracked.origin.value, self.dims, self.rows)
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
            maps = axis_maps(value.shape[axis], size, forward.batch_axis, None)
            rows = RowAxis(axis, value.shape[axis], maps, size)
            expanded = Expanded(value, value.dim(), rows)
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
            return derive(self.operation)


def _entered(
    name: str,
    tracked: TrackedTensor,
    expanded: Expanded,
    forward: ForwardContext,
    *,
    behind: Any,
    wants_gradient: bool,
) -> Tensor:
    """Return an expanded parameter as a node of its own in the graph, with a use attached."""
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
        set_metadata(entered.grad_fn, ROWS_KEY, rows if rows.axis < 0 else rows._replace(axis=expanded.row_axis))
    entered.register_hook(use.arrive)
    return entered
