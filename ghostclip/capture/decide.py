"""`decide`: how an operation on tracked tensors is to run. Nothing runs here, and nothing is registered.

Parameters and constants alone are derived. Where per-sample data comes in, the first way that fits: a registered rule
(factors from the saved input and the gradient), broadcasting over the batch (elementwise operations, tensors with a
batch axis of their own), the general way of ``general.py``.

`DecisionCache` keeps the decisions that hold for all forwards, whatever their number of samples.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ghostclip import _torch, _tree
from ghostclip.capture import broadcast
from ghostclip.capture.attach import carry_out_again
from ghostclip.capture.batch_axis import RowMap
from ghostclip.capture.call_sites import MAX_ATTEMPTS, CallSite, Form, key_of, visits_of
from ghostclip.capture.decompose import decompose
from ghostclip.capture.derive import reorders_copies
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.growth import CONSTANT, UNKNOWN, compared
from ghostclip.capture.inputs import in_backward
from ghostclip.capture.layouts import ArgumentLayout, is_data, own_axis
from ghostclip.capture.operation import Operation
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.plans import Broadcast, ByRule, Derive, General, Inside, OwnCopies, Plain, Plan, Write
from ghostclip.capture.rewrite import rewritten
from ghostclip.capture.row_maps import RowOrder, candidates_along, order_of_rows, row_maps, wants_gradient
from ghostclip.capture.row_origin import UNKNOWN_ORDER, leads_to, origin_of_rows, straight_behind
from ghostclip.capture.tracked import TrackedTensor, plain
from ghostclip.capture.writes import refuse_data
from ghostclip.errors import GhostClipError
from ghostclip.rules import Call, Captured, Rule, follows_from_form, is_rule_for, rule_for

# One of two tensors is brought to the other's dtype, device or shape; the other's values take no part.
_LIKE: Final = frozenset({"to", "type_as", "view_as", "reshape_as", "expand_as"})
# More forms than this are no forms: something in the arguments is new each time.
_MOST: Final = 4096
# Forms of factors that several parameters can have together.
_TOGETHER: Final = frozenset({"outer product", "dense"})
_VALUES: Final = frozenset({type(None), bool, int, float, str})
# A torch function, and the number (``id``) of its first tracked argument, which lives as long as the decision.
CallKey: TypeAlias = tuple[Callable[..., Any], int]


class Decision(NamedTuple):
    """What was decided on an operation.

    Attributes:
        plan: How it runs.
        orders: How rows of its data were put into order, for the forward to note.
    """

    plan: Plan
    orders: tuple[RowOrder, ...] = ()


def decide(operation: Operation, layout: ArgumentLayout, forward: ForwardContext) -> Decision:
    """Decide how an operation runs.

    Args:
        operation: The operation; some of its arguments are tracked.
        layout: Where samples lie in its arguments.
        forward: The forward; it is only read.

    Returns:
        The decision.

    Raises:
        UnsupportedModelError: It writes per-sample data into what was computed from parameters.
    """
    orders = tuple(
        order for tensor in operation.plain if (order := _unknown_order(tensor, layout, forward)) is not None
    )
    data = [tensor for tensor in operation.plain if is_data(tensor, layout, operation.name, forward)]
    if not data or reorders_copies(operation, forward.batch_size):
        return Decision(Write(operation) if operation.is_in_place else Derive(operation), orders)
    refuse_data(operation)
    decomposed = decompose(operation.func, operation.name, forward)
    if decomposed is not None:
        return Decision(Inside(partial(decomposed, *operation.args, **operation.kwargs)), orders)
    again = rewritten(operation)
    if again is not None:
        return Decision(Inside(partial(_inside, again, forward)), orders)
    if operation.name in _LIKE:
        is_target = isinstance(operation.args[0], TrackedTensor)
        return Decision(Derive(operation) if is_target else Plain(operation), orders)
    plan, more = _consuming(operation, layout, data, forward)
    return Decision(plan, (*orders, *more))


def _inside(run: Callable[[], Any], forward: ForwardContext) -> Any:
    with forward.around.rows.inside():
        return run()


def _unknown_order(tensor: Tensor, layout: ArgumentLayout, forward: ForwardContext) -> RowOrder | None:
    if forward.batch_size < 2 or tensor.requires_grad:
        return None
    unknown = forward.around.rows.samples_of(tensor, constant=layout.axis(tensor) == CONSTANT) is UNKNOWN_ORDER
    return RowOrder(None, unknown=True, in_graph=False) if unknown else None


def _consuming(
    operation: Operation, layout: ArgumentLayout, data: Sequence[Tensor], forward: ForwardContext
) -> tuple[Plan, list[RowOrder]]:
    """Decide how parameters and data meet; returns the orders of the rows that were looked at as well."""
    bound = _bound(operation, forward)
    own = _own_axes(operation, layout, forward)
    orders: list[RowOrder] = []
    if own and all(tracked.origin.value.dim() > 2 for tracked in operation.tracked):
        # One matrix for every sample is no product over letters that all samples share.
        return OwnCopies(operation, own), orders
    if bound is not None:
        targets, captured = bound
        known = _axis_of_rows(operation, captured, layout, forward)
        sizes = tuple(captured.rows.shape[: captured.num_batch_dims])
        maps, order = row_maps(captured.rows, sizes, known, forward)
        orders.append(order)
        if maps:
            rows, saved = captured.rows, captured.saved
            by_rule = ByRule(operation.name, targets, captured, rows, saved, sizes, maps, known, operation.run_plain)
            by_rule.alike = _alike(operation, by_rule, forward)
            return by_rule, orders
        if known < 0 and not operation.is_in_graph:
            # The samples' number stands on an axis that cannot hold samples: a constant.
            return Derive(operation), orders
    if broadcast.is_elementwise(operation.name):
        plan = _broadcast(operation, layout, data, forward, orders)
        if plan is not None:
            return plan, orders
    return OwnCopies(operation, own) if own else General(operation, layout), orders


def _own_axes(operation: Operation, layout: ArgumentLayout, forward: ForwardContext) -> dict[int, int]:
    """Return the axis along which each tracked tensor has one copy a sample; empty where one has not."""
    if forward.batch_size < 2 or operation.is_in_place:
        return {}
    axes = {id(tracked): own_axis(tracked, layout, forward) for tracked in operation.tracked}
    return {} if CONSTANT in axes.values() else axes


def _bound(operation: Operation, forward: ForwardContext) -> tuple[dict[str, TrackedTensor], Captured] | None:
    try:
        return _bind(operation)
    except GhostClipError as error:
        place = forward.around.describe(operation.tracked[0].origin.names[0])
        raise type(error)(f"{place}: {error}") from None


def _bind(
    operation: Operation, in_place_of: Mapping[int, Tensor] | None = None
) -> tuple[dict[str, TrackedTensor], Captured] | None:
    """Ask the rule of an operation, of other tensors in the place of its own where some are given."""
    entry = rule_for(operation.name)
    if entry is None or any(tracked.origin.value.is_complex() for tracked in operation.tracked):
        # Rules multiply without conjugating.
        return None
    rule, names = entry
    given = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}
    targets = {key: value for key, value in given.items() if isinstance(value, TrackedTensor)}
    if len(targets) != len(operation.tracked):
        return None
    values = plain(given)
    if in_place_of is not None:
        values = _tree.mapped(lambda item: in_place_of.get(id(item), item), given)
    captured = rule(Call(operation.name, values, frozenset(targets)))
    return None if captured is None else (targets, captured)


def _axis_of_rows(operation: Operation, captured: Captured, layout: ArgumentLayout, forward: ForwardContext) -> int:
    """Return the axis of a rule's rows that holds samples, `CONSTANT` or `UNKNOWN`.

    Rows that the rule has turned are asked for once more, of tensors with the shapes for one sample more.
    """
    known = layout.axis(captured.rows)
    if known != UNKNOWN or not layout.grown or any(tensor is captured.rows for tensor in operation.plain):
        return known
    pairs = zip(_tree.tensors((operation.args, operation.kwargs)), layout.grown, strict=True)
    empty = {id(tensor): _of_shape(tensor, shape) for tensor, shape in pairs}
    try:
        more = _bind(operation, empty)
    except (RuntimeError, ValueError, IndexError, GhostClipError):
        return UNKNOWN
    if more is None:
        return UNKNOWN
    axes = compared((tuple(captured.rows.shape),), (tuple(more[1].rows.shape),), forward.batch_size)
    return UNKNOWN if axes is None else axes[0]


def _of_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    with _torch.subclasses_off():
        value = tensor.origin.value if isinstance(tensor, TrackedTensor) else tensor.detach()
        return value.new_zeros(()).expand(shape)


def _broadcast(
    operation: Operation,
    layout: ArgumentLayout,
    data: Sequence[Tensor],
    forward: ForwardContext,
    orders: list[RowOrder],
) -> Broadcast | None:
    """Decide to expand every tracked argument over the batch axis of the data; None where no axis is found."""
    size, axis = forward.batch_size, forward.batch_axis
    shapes = [t.shape for t in operation.plain] + [t.origin.value.shape for t in operation.tracked]
    dims = len(torch.broadcast_shapes(*shapes))
    found = _grown_axis(data, dims, layout) or broadcast.row_axis_of(data, dims, size, axis)
    if found is None:
        return None
    place, count, witness = found
    if size > 1:
        orders.append(order_of_rows(witness, place - dims + witness.dim(), forward))
    maps = broadcast.map_of_rows(count, size, axis, orders[-1].samples if size > 1 else None)
    return Broadcast(operation, dims, broadcast.RowAxis(place, count, maps, size), witness) if maps else None


def _grown_axis(data: Sequence[Tensor], dims: int, layout: ArgumentLayout) -> tuple[int, int, Tensor] | None:
    """Return the axis of a broadcast result that holds samples, its size, and the tensor that shows it."""
    for tensor in sorted(data, key=lambda tensor: not tensor.requires_grad):
        axis = layout.axis(tensor)
        if axis >= 0:
            return dims - tensor.dim() + axis, tensor.shape[axis], tensor
    return None


class _DataForm(NamedTuple):
    """The form of an argument that is data."""

    dims: int
    dtype: torch.dtype
    requires_grad: bool
    layout: torch.layout


@dataclass(eq=False)
class _Kept:
    """The decision for one form of an operation on its parameters.

    Attributes:
        plan: The plan, without tensors of data.
        rule: The rule that made it.
        visits: Under what a forward counts it, see `visits_of`.
        form: The forms of its positional arguments, see `_form_of`.
        named: Those of its keyword arguments.
        values: Its arguments with parameters detached: positional and keyword ones.
        rows: Where its data stands: the number of a position, the name of a keyword.
        saves: Whether the backward wants the data back.
        calls: Its call site, and the axis that holds samples, by the number of the call and of the site.
        product: Whether it is a product of matrices.
        objects: The positional arguments that it was decided on, without the data.
        identities: Their numbers (``id``).
    """

    plan: ByRule
    rule: Rule
    visits: tuple[str, str]
    form: list[Any]
    named: dict[str, Any]
    values: tuple[list[Any], dict[str, Any]]
    rows: Any
    saves: bool
    calls: dict[tuple[int, int], tuple[CallSite, int]] = field(default_factory=dict)
    product: bool = False
    objects: Sequence[Any] = ()
    identities: list[int] = field(default_factory=list)

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether arguments have the form that was decided on."""
        forms, named = self.form, self.named
        if self.identities and len(args) == len(forms) and not kwargs:
            identities = list(map(id, args))
            identities[self.rows] = 0
            if identities == self.identities:
                return _has_form(args[self.rows], forms[self.rows])
        if len(args) != len(forms) or len(kwargs) != len(named):
            return False
        for item, form in zip(args, forms, strict=False):
            if item is not form and not _has_form(item, form):
                return False
        for key, item in kwargs.items():
            form = named.get(key, NotImplemented)
            if item is not form and not _has_form(item, form):
                return False
        return True

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: ForwardContext
    ) -> Tensor | None:
        """Run the operation with a new use, on arguments that have the form; its call is counted then.

        Args:
            func: The torch function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            forward: The forward that it is part of.

        Returns:
            What the function returns, in the graph; None where it must be decided on.
        """
        visits, (calls, uses), plan = forward.visits, self.visits, self.plan
        numbers = visits[calls] + 1, visits[uses] + 1
        site, known = self.calls.get(numbers, _NO_SITE)
        if site is None or site.attempts < MAX_ATTEMPTS or not is_rule_for(plan.name, self.rule):
            return None
        place, captured = self.rows, plan.captured
        values, keywords = self.values
        if type(place) is int:
            rows: Tensor = args[place]
            values = values.copy()
            values[place] = rows
        else:
            rows = kwargs[place]
            keywords = {**keywords, place: rows}
        dims, wanted = captured.num_batch_dims, rows.requires_grad
        # A slice of a torch.Size costs as much as ten of a tuple.
        sizes = tuple(rows.shape)[:dims]
        if wanted and known >= 0:
            in_order, anchored = straight_behind(rows)
            maps = _maps_along(rows, sizes, known, forward, in_order=in_order)
        else:
            maps, anchored = _maps_as_ever(rows, sizes, known, forward), not wanted
            wanted = wanted or wants_gradient([rows], forward)
        if not maps:
            return None
        visits[calls], visits[uses] = numbers
        use = ParamUse(
            site, forward, plan.targets, captured.factors, dims, maps, None, rows.grad_fn, sizes, wanted, plan.alike
        )
        anchored = anchored or leads_to(rows, forward.around.anchor)
        call, saved = partial(func, *values, **keywords), (rows,) if self.saves else ()
        return carry_out_again(use, call, saved=saved, order=captured.order, product=self.product, anchored=anchored)


class DecisionCache:
    """Decisions by what they follow from: the function, its parameters, and the form of its other arguments.

    A rule's decision holds for every number of samples. Looked at again is what may change from forward to forward:
    the axis of the samples, whether rows were put into another order, whether data outside the graph is data at all.
    """

    def __init__(self) -> None:
        """Make an empty cache."""
        self._kept: defaultdict[Any, list[_Kept]] = defaultdict(list)
        self._size = 0

    def forget(self) -> None:
        """Decide anew on everything: evidence speaks against a decision, or parameters were exchanged."""
        self._kept.clear()
        self._size = 0

    def run(
        self, key: CallKey, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: ForwardContext
    ) -> Tensor | None:
        """Run an operation that was decided on before.

        Args:
            key: The torch function, and the number (``id``) of its first tracked argument.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            forward: The forward.

        Returns:
            What the function returns, in the graph; None where it must be decided on, with nothing done.
        """
        for kept in self._kept.get(key, ()):
            if kept.fits(args, kwargs):
                if not torch.is_grad_enabled() or forward.grown is not None or in_backward():
                    return None
                return kept.run(key[0], args, kwargs, forward)
        return None

    def put(self, key: CallKey, operation: Operation, plan: ByRule, use: ParamUse) -> None:
        """Keep a decision, if it follows from the form of the arguments.

        Args:
            key: As for `get`.
            operation: The operation.
            plan: What was decided.
            use: The use that it has in this forward.
        """
        forward = use.forward
        if forward.batch_size < 2 or in_backward() or not _is_of_form(operation, plan):
            # With one sample every axis may hold it: what is met then says nothing about more.
            return
        args, kwargs, entry = operation.args, operation.kwargs, rule_for(operation.name)
        form, named = list(map(_form_of, args)), {name: _form_of(item) for name, item in kwargs.items()}
        if entry is None or any(part is NotImplemented for part in (*form, *named.values())):
            return
        kept = next((kept for kept in self._kept.get(key, ()) if kept.fits(args, kwargs)), None)
        if kept is None or kept.rule is not entry[0]:
            if self._size >= _MOST:
                self.forget()
            places: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
            rows = next(place for place, item in places if item is plan.rows)
            # Data is put in its place in each call.
            values = _without(plan.rows, list(plain(args))), dict(plain(kwargs))
            if type(rows) is str:
                values[1][rows] = None
            own = visits_of(key_of(operation.tracked, operation.name))
            kept = _Kept(_without_data(plan), entry[0], own, form, named, values, rows, bool(plan.saved))
            kept.product = plan.is_product
            if type(rows) is int and not kwargs and not any(type(item) is list for item in args):
                # Whatever else is of the form never changes: tracked parameters, numbers, tuples of numbers.
                kept.objects = _without(plan.rows, list(args))
                kept.identities = [0 if item is plan.rows else id(item) for item in args]
            found = self._kept[key]
            found[:] = [kept, *(other for other in found if not other.fits(args, kwargs))]
            self._size += 1
        calls, uses = kept.visits
        kept.calls[forward.visits[calls], forward.visits[uses]] = use.site, plan.known


_NOTHING: Final = torch.empty(0)
_NO_SITE: Final = (None, UNKNOWN)


def _without(data: Tensor, arguments: list[Any]) -> list[Any]:
    return [None if item is data else item for item in arguments]


def _without_data(plan: ByRule) -> ByRule:
    captured = replace(plan.captured, saved=(), rows=_NOTHING)
    return ByRule(plan.name, plan.targets, captured, _NOTHING, (), (), [], plan.known, _NOTHING.clone, alike=plan.alike)


def _maps_along(
    rows: Tensor, sizes: tuple[int, ...], axis: int, forward: ForwardContext, *, in_order: bool
) -> list[RowMap]:
    """Return the row maps of data in the graph, along a known axis; empty where rows were gathered this time."""
    size, expected = forward.batch_size, forward.batch_axis
    if axis == 0 and not in_order and origin_of_rows(rows, 0, size, expected) is not None:
        return []
    return candidates_along(axis, sizes, size, expected)


def _maps_as_ever(rows: Tensor, sizes: tuple[int, ...], known: int, forward: ForwardContext) -> list[RowMap]:
    """Return the row maps of other data of a known form; empty where something is different now."""
    if not rows.requires_grad and (known < 0 or forward.around.rows.samples_of(rows) is not None):
        return []
    maps, order = row_maps(rows, sizes, known, forward)
    return [] if order.samples is not None or order.unknown else maps


def _is_of_form(operation: Operation, plan: ByRule) -> bool:
    """Return whether a plan follows from the form of its arguments alone."""
    rows = plan.rows
    if not follows_from_form(operation.name) or plan.maps[0].kind == "gathered":
        return False
    # Rows that a rule has turned (products, tracked inputs) are another object; what it captures follows sizes.
    if len(operation.plain) != 1 or operation.plain[0] is not rows:
        return False
    return all(saved is rows for saved in plan.saved) and not any(t.origin.func for t in operation.tracked)


def _alike(operation: Operation, plan: ByRule, forward: ForwardContext) -> Form | None:
    """Return what is equal for operations whose captures differ in nothing but the parameters: see `ParamUse.alike`."""
    if plan.captured.form not in _TOGETHER or plan.captured.order or not _is_of_form(operation, plan):
        return None
    if any(not tracked.origin.value.is_contiguous() for tracked in operation.tracked):
        return None
    arguments = [*enumerate(operation.args), *operation.kwargs.items()]
    # Of data in the graph and outside it the factors are the same.
    forms = [(place, _form_of(item)) for place, item in arguments if type(item) is not TrackedTensor]
    form = [(place, (one.dims, one.dtype, one.layout) if type(one) is _DataForm else one) for place, one in forms]
    values = [(place, item.origin.value) for place, item in arguments if type(item) is TrackedTensor]
    own = [(place, value.shape, value.dtype, value.device) for place, value in values]
    if any(part is NotImplemented for _, part in form):
        return None
    elements = sum(value.numel() for _, value in values)
    return forward.around.sites.forms.setdefault((rule_for(operation.name), tuple(form), tuple(own)), Form(elements))


def _form_of(item: Any) -> Any:
    """Return what an argument must be for a decision to hold: itself, or the form of data.

    Not implemented where it is a container of tensors, or an object whose value is not its own.
    """
    kind = type(item)
    if kind is TrackedTensor or kind in _VALUES:
        return item
    if kind is Tensor:
        return _DataForm(item.dim(), item.dtype, item.requires_grad, item.layout)
    if (kind is tuple or kind is list or kind is torch.Size) and all(type(part) is int for part in item):
        return tuple(item)
    return NotImplemented


def _has_form(item: Any, form: Any) -> bool:
    """Return whether an argument that is another object than its form is of that form."""
    kind = type(item)
    if kind is Tensor:
        return (
            type(form) is _DataForm
            and item.dim() == form.dims
            and item.dtype is form.dtype
            and item.requires_grad is form.requires_grad
            and item.layout is form.layout
        )
    if kind in _VALUES:
        return kind is type(form) and item == form
    return (kind is tuple or kind is list or kind is torch.Size) and type(form) is tuple and tuple(item) == form
