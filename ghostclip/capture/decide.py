"""`decide`: how an operation on tracked tensors is to run. Nothing runs here, and nothing is registered.

Parameters and constants alone are derived. Where per-sample data comes in, the first way that fits: a registered rule
(factors from the saved input and the gradient), broadcasting over the batch (elementwise operations, tensors with a
batch axis of their own), the general way.

`DecisionCache` keeps the decisions that hold for all forwards, whatever their number of samples.

Some functions are first written in operations that samples can be followed through (`decompose`, `rewritten`).
Functions of ``torch.nn.functional`` that are written in Python run as they are; recurrent layers and cells, which torch
has as single functions, run as ``ghostclip.rules.recurrent`` writes them out; ``linear_cross_entropy`` runs without
logits.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from opt_einsum import contract_path
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.call_sites import (
    CONSTANT,
    FIRST,
    MAX_ATTEMPTS,
    CallSite,
    OperationForm,
    Visits,
    counted_as,
    key_of,
)
from ghostclip.capture.derive import derive, refuse_data, reorders_copies, write
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import FactorFunction, ParamUse, attached, run_and_save
from ghostclip.capture.plans import Broadcast, ByRule, Direct, General, PerSampleCopies, Plan
from ghostclip.capture.row_maps import (
    IN_ORDER,
    ArgumentLayout,
    RowAxis,
    RowMap,
    RowOrder,
    axis_maps,
    candidates_along,
    is_data,
    is_elementwise,
    order_of_rows,
    per_sample_axis,
    row_axis_of,
    row_maps,
)
from ghostclip.capture.sample_axis import UNKNOWN_ORDER, Followed, leads_to
from ghostclip.capture.tracked import Operation, TrackedTensor, plain
from ghostclip.errors import GhostClipError
from ghostclip.rules import Call, Captured, Rule, follows_from_form, is_rule_for, rule_for
from ghostclip.rules.head import linear_cross_entropy
from ghostclip.rules.recurrent import CELLS, LAYERS, WRITTEN_OUT, is_packed

# In the code of torch functions that dispatch on their arguments' classes: their body does not run on tracked ones.
_CHECKS: Final = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_COPIES: dict[Callable[..., Any], Callable[..., Any]] = {}


def decompose(func: Callable[..., Any], name: str, forward: ForwardContext) -> Callable[..., Any] | None:
    """Return the function in a form that runs its own operations one by one, or None if it is one operation."""
    inside = inside_of(func, name)
    if inside is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        # Attention and recurrent layers work on (T, B, E) whatever the module's batch_first says.
        second = name == "multi_head_attention_forward" or (name in LAYERS and not is_packed(args, kwargs))
        if name in CELLS and len(args) > 1:
            forward.around.rows.lay_beside(args[0], args[1])
        with forward.along(1 if second else forward.batch_axis), forward.around.rows.inside():
            return inside(*args, **kwargs)

    return run


def inside_of(func: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Return a torch function such that operations in its Python body are intercepted; None if it has no such body."""
    if name in WRITTEN_OUT:
        return _reentered(WRITTEN_OUT[name])
    if not isinstance(func, FunctionType) or rule_for(name) is not None:
        return None
    if not any(check in func.__code__.co_names for check in _CHECKS):
        return None
    if name == "linear_cross_entropy":
        return _reentered(partial(linear_cross_entropy, otherwise=_without_dispatch(func)))
    return _reentered(_without_dispatch(func))


def _without_dispatch(func: FunctionType) -> Callable[..., Any]:
    """Return a copy of a Python torch function without its own override check; nested functions keep theirs."""
    if func not in _COPIES:
        scope = {**func.__globals__, **dict.fromkeys(_CHECKS, _never)}
        copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
        copy.__kwdefaults__ = func.__kwdefaults__
        _COPIES[func] = copy
    return _COPIES[func]


def _never(*args: Any) -> bool:
    return False


def _reentered(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with interception switched on again (it is off inside ``__torch_function__``)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _torch.overrides_on():
            return func(*args, **kwargs)

    return run


def rewritten(operation: Operation) -> Callable[[], Any] | None:
    """Return the same computation in other operations, which are intercepted as usual, or None."""
    rule = _RULES.get(operation.name)
    run = None if rule is None else rule(operation)
    return None if run is None else _reentered(run)


def _einsum(operation: Operation) -> Callable[[], Any] | None:
    """Two operands at a time where several are tracked, as a product of factors (LoRA) needs it."""
    equation, *operands = operation.args
    several = sum(isinstance(operand, TrackedTensor) for operand in operands) > 1
    if not several or len(operands) < 3 or not isinstance(equation, str) or "." in equation:
        return None
    shapes = [tuple(operand.shape) for operand in operands]

    def run() -> Any:
        left = list(operands)
        for indices, _, step, *_ in contract_path(equation, *shapes, shapes=True, einsum_call=True)[1]:
            picked = [left.pop(index) for index in indices]
            left.append(torch.einsum(step, *picked))
        return left[0]

    return run


def _masked_fill(operation: Operation) -> Callable[[], Any] | None:
    """``x.masked_fill(mask, p)`` as `torch.where`, whose capture is elementwise."""
    arguments = {**dict(zip(("input", "mask", "value"), operation.args, strict=False)), **operation.kwargs}
    x, mask, value = (arguments.get(name) for name in ("input", "mask", "value"))
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or not isinstance(value, TrackedTensor):
        return None

    def run() -> Any:
        filled = torch.where(mask, value.to(x.dtype), x)
        return x.copy_(filled) if operation.is_in_place else filled

    return run


def _masked_rows(operation: Operation) -> Callable[[], Any] | None:
    """``x[mask] = p`` with one value for all masked positions."""
    x, mask, value = operation.args
    if isinstance(x, TrackedTensor) or not isinstance(mask, Tensor) or not isinstance(value, TrackedTensor):
        return None
    if mask.dtype != torch.bool or value.origin.value.dim() > x.dim() - mask.dim():
        return None

    def run() -> None:
        spread = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        x.copy_(torch.where(spread, value.to(x.dtype), x))

    return run


_RULES: dict[str, Callable[[Operation], Callable[[], Any] | None]] = {
    "einsum": _einsum,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill,
    "__setitem__": _masked_rows,
}


# One of two tensors is brought to the other's dtype, device or shape; the other's values take no part.
_LIKE: Final = frozenset({"to", "type_as", "view_as", "reshape_as", "expand_as"})
# More forms than this are no forms: something in the arguments is new each time.
_MOST: Final = 4096
# Of a call, shapes of its data by which the way of its rows is remembered.
_SHAPES: Final = 64
# Forms of factors that several parameters can have together.
_TOGETHER: Final = frozenset({"outer product", "dense"})
_VALUES: Final = frozenset({type(None), bool, int, float, str})
# A torch function, and the number (``id``) of its first tracked argument, which lives as long as the decision.
CallKey: TypeAlias = tuple[Callable[..., Any], int]


class Decision(NamedTuple):
    """Decision on an operation."""

    plan: Plan  # how it runs
    orders: tuple[RowOrder, ...] = ()  # how rows of its data were put into order, for the forward to note


def decide(operation: Operation, layout: ArgumentLayout, forward: ForwardContext) -> Decision:
    """Decide how an operation with tracked arguments runs; the forward is only read."""
    orders = tuple(
        order for tensor in operation.plain if (order := _unknown_order(tensor, layout, forward)) is not None
    )
    data = [tensor for tensor in operation.plain if is_data(tensor, layout, operation.name, forward)]
    if not data or reorders_copies(operation, forward.batch_size):
        if operation.is_in_place:
            return Decision(Direct(lambda: write(operation, forward.around.buffers())), orders)
        return Decision(Direct(partial(derive, operation)), orders)
    refuse_data(operation)
    decomposed = decompose(operation.func, operation.name, forward)
    if decomposed is not None:
        return Decision(Direct(partial(decomposed, *operation.args, **operation.kwargs)), orders)
    again = rewritten(operation)
    if again is not None:
        return Decision(Direct(partial(_inside, again, forward)), orders)
    if operation.name in _LIKE:
        is_target = isinstance(operation.args[0], TrackedTensor)
        return Decision(Direct(partial(derive, operation) if is_target else operation.run_plain), orders)
    plan, more = _consuming(operation, layout, data, forward)
    return Decision(plan, (*orders, *more))


def _inside(run: Callable[[], Any], forward: ForwardContext) -> Any:
    """Run a rewritten operation as part of the running call, so that its operations have keys of their own."""
    with forward.around.rows.inside():
        return run()


def _unknown_order(tensor: Tensor, layout: ArgumentLayout, forward: ForwardContext) -> RowOrder | None:
    """Return a `RowOrder` of unknown order for data outside the graph in such an order; None for other tensors."""
    if forward.batch_size < 2 or tensor.requires_grad:
        return None
    unknown = forward.around.rows.samples_of(tensor, constant=layout.axis(tensor) == CONSTANT) is UNKNOWN_ORDER
    return RowOrder(None, unknown=True, in_graph=False) if unknown else None


def _consuming(
    operation: Operation, layout: ArgumentLayout, data: Sequence[Tensor], forward: ForwardContext
) -> tuple[Plan, list[RowOrder]]:
    """Choose the plan of an operation that combines parameters with per-sample data."""
    bound = _apply_rule(operation, forward)
    sample_axes = _per_sample_axes(operation, layout, forward)
    orders: list[RowOrder] = []
    if sample_axes and all(tracked.origin.value.dim() > 2 for tracked in operation.tracked):
        # One matrix for every sample is no product over letters that all samples share.
        return PerSampleCopies(operation, sample_axes), orders
    if bound is not None:
        targets, captured = bound
        known = layout.axis(captured.rows)
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
            return Direct(partial(derive, operation)), orders
    if is_elementwise(operation.name):
        plan = _broadcast(operation, layout, data, forward, orders)
        if plan is not None:
            return plan, orders
    return PerSampleCopies(operation, sample_axes) if sample_axes else General(operation, layout), orders


def _per_sample_axes(operation: Operation, layout: ArgumentLayout, forward: ForwardContext) -> dict[int, int]:
    """Return the axis along which each tracked tensor has one copy per sample; empty where one has not."""
    if forward.batch_size < 2 or operation.is_in_place:
        return {}
    axes = {id(tracked): per_sample_axis(tracked, layout, forward) for tracked in operation.tracked}
    return {} if CONSTANT in axes.values() else axes


def _apply_rule(operation: Operation, forward: ForwardContext) -> tuple[dict[str, TrackedTensor], Captured] | None:
    """Apply the operation's rule: return its tracked arguments by name and what the rule captured; None without one."""
    entry = rule_for(operation.name)
    if entry is None or any(tracked.origin.value.is_complex() for tracked in operation.tracked):
        # Rules multiply without conjugating.
        return None
    rule, names = entry
    arguments = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}
    targets = {key: value for key, value in arguments.items() if isinstance(value, TrackedTensor)}
    if len(targets) != len(operation.tracked):
        return None
    try:
        captured = rule(Call(operation.name, plain(arguments), frozenset(targets)))
    except GhostClipError as error:
        # It does not know the module of the parameter.
        location = forward.around.describe(operation.tracked[0].origin.names[0])
        raise type(error)(f"{location}: {error}") from None
    return None if captured is None else (targets, captured)


def _broadcast(
    operation: Operation,
    layout: ArgumentLayout,
    data: Sequence[Tensor],
    forward: ForwardContext,
    orders: list[RowOrder],
) -> Broadcast | None:
    """Return the plan that expands every tracked argument over the axis of samples; None where no axis is found."""
    size, axis = forward.batch_size, forward.batch_axis
    shapes = [t.shape for t in operation.plain] + [t.origin.value.shape for t in operation.tracked]
    dims = len(torch.broadcast_shapes(*shapes))
    row_axis = _sample_axis(data, dims, layout) or row_axis_of(data, dims, size, axis)
    if row_axis is None:
        return None
    result_axis, count, witness = row_axis
    order = order_of_rows(witness, result_axis - dims + witness.dim(), forward) if size > 1 else IN_ORDER
    orders.append(order)
    routed = None if order.samples is None else RowMap("gathered", 0, order.samples)
    maps = axis_maps(count, size, axis, order.row_map or routed)
    return Broadcast(operation, dims, RowAxis(result_axis, count, maps, size), witness) if maps else None


def _sample_axis(data: Sequence[Tensor], dims: int, layout: ArgumentLayout) -> tuple[int, int, Tensor] | None:
    """Return the axis of a broadcast result that has samples, its size, and the tensor that shows it."""
    for tensor in sorted(data, key=lambda tensor: not tensor.requires_grad):
        axis = layout.axis(tensor)
        if axis >= 0:
            return dims - tensor.dim() + axis, tensor.shape[axis], tensor
    return None


class _DataForm(NamedTuple):
    """The form of an argument that is data."""

    dims: int  # number of its axes
    dtype: torch.dtype
    requires_grad: bool
    layout: torch.layout


@dataclass(eq=False, slots=True)
class _KnownCall:
    """One of the calls of an operation in a forward, which take place in every forward."""

    site: CallSite
    known: int  # axis of its data that has samples
    # by the shape of its data, the number of samples and the batch axis: how data in the graph was reached (None in a
    # batch of one sample), and how its rows may map to samples
    readings: dict[tuple[torch.Size, int, int], tuple[Followed | None, list[RowMap]]] = field(default_factory=dict)

    def maps(self, rows: Tensor, sizes: tuple[int, ...], forward: ForwardContext) -> list[RowMap]:
        """Return the row maps of data in the graph; empty where its rows came in another order, or another way."""
        size, edge = forward.batch_size, (rows.grad_fn, rows.output_nr)
        key = rows.shape, size, forward.batch_axis
        way, maps = self.readings.get(key, (None, None))
        if maps is None or not (way is None or way.matches(edge)):
            if len(self.readings) >= _SHAPES:
                self.readings.clear()
            way = Followed(edge) if size > 1 else None
            maps = candidates_along(self.known, sizes, size, forward.batch_axis)
            followed = None if way is None else way.rows
            if followed is not None and (followed.order is not None or followed.axis != self.known):
                maps = []
            elif followed is not None and sizes[self.known : self.known + 1] == (followed.size,):
                first = RowMap.of(followed, size)
                maps = [first, *(one for one in maps if one.kind != first.kind)]
            self.readings[key] = way, maps
        # Evidence on data that was followed says nothing of other data.
        elsewhere = way is not None and way.rows is None and self.site.chosen == ("followed", self.known)
        return [] if elsewhere else maps


@dataclass(eq=False, slots=True)
class _CachedDecision:
    """A cached decision: how an operation on its parameters runs, for one form of its other arguments."""

    name: str
    rule: Rule
    visits: str  # key under which a forward counts it, see `counted_as`
    # arguments that it was decided on, keyword ones last, with `_DATA` in the place of the data
    objects: tuple[Any, ...]
    positional: int  # how many of them are positional
    names: tuple[str, ...]  # keywords of the others, in order
    place: int  # index of the data among them
    form: _DataForm
    values: list[Any]  # positional arguments with parameters detached
    keywords: dict[str, Any]  # keyword arguments with parameters detached
    rows: Any  # where the data is: an index, or a keyword
    saves: bool  # whether the backward needs the data
    product: bool  # whether it is a product of matrices
    plain: bool  # whether no parameter is of a class that overrides torch's functions
    targets: dict[str, TrackedTensor]  # this and what follows down to `alike`: see `ParamUse`
    factors: FactorFunction
    dims: int  # number of batch axes of the data
    order: tuple[int, ...]  # axes of the output, those of its rows first, see `Captured`
    alike: OperationForm | None
    # by the number of the call and of the site
    calls: dict[Visits, _KnownCall] = field(default_factory=dict)

    def data_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the data among arguments of the cached form; None for another form."""
        objects = self.objects
        if len(args) != self.positional or len(args) + len(kwargs) != len(objects):
            return None
        items: Sequence[Any] = args
        if kwargs:
            if tuple(kwargs) != self.names:
                return None
            items = (*args, *kwargs.values())
        for item, cached in zip(items, objects, strict=False):
            # What never changes is the same object nearly always.
            if item is not cached and cached is not _DATA and not _is_equal(item, cached):
                return None
        rows = items[self.place]
        dims, dtype, in_graph, layout = self.form
        fits = (
            type(rows) is Tensor
            and rows.dim() == dims
            and rows.dtype is dtype
            and rows.requires_grad is in_graph
            and rows.layout is layout
        )
        return rows if fits else None

    def run(self, func: Callable[..., Any], rows: Tensor, forward: ForwardContext) -> Tensor | None:
        """Run the operation with a new counted use; None, with nothing done, where its evidence does not hold."""
        # None for another form.
        before = forward.visits.get(self.visits)
        visits = FIRST if before is None else (before[0] + 1, before[1] + 1)
        call = self.calls.get(visits)
        if call is None or call.site.attempts < MAX_ATTEMPTS or not is_rule_for(self.name, self.rule):
            return None
        known, sizes, wanted = call.known, tuple(rows.shape[: self.dims]), self.form.requires_grad
        in_graph = wanted and known >= 0
        maps = call.maps(rows, sizes, forward) if in_graph else _maps_as_ever(rows, sizes, known, forward)
        if not maps:
            return None
        forward.visits[self.visits] = visits
        use = ParamUse(
            call.site, forward, self.targets, self.factors, self.dims, maps, None, rows.grad_fn, sizes, wanted,
            self.alike, order=self.order,
        )  # fmt: skip
        # What was followed has led to a captured operation.
        anchored = not wanted or maps[0].followed is not None or leads_to(rows, forward.around.anchor)
        return attached(use, self._output(func, rows, use), behind=use.behind, anchored=anchored)

    def _output(self, func: Callable[..., Any], rows: Tensor, use: ParamUse) -> Tensor:
        """Run the operation, with the tensors that its backward needs stored for a use."""
        place, values, keywords = self.rows, self.values, self.keywords
        if type(place) is int:
            values = values.copy()
            values[place] = rows
        else:
            keywords = {**keywords, place: rows}
        run = partial(func, *values, **keywords) if self.plain else partial(_past_overrides, func, values, keywords)
        return run_and_save(use, run, (rows,) if self.saves else (), product=self.product)


class DecisionCache:
    """Cache of decisions, keyed by the function, its parameters, and the form of its other arguments."""

    # A rule's decision holds for every number of samples. Checked again is what may change from forward to forward: the
    # axis of the samples, whether rows were put into another order, whether data outside the graph is data at all.
    def __init__(self) -> None:
        self._cached: defaultdict[Any, list[_CachedDecision]] = defaultdict(list)  # by key, see `run`
        self._size = 0

    def forget(self) -> None:
        """Drop all decisions: evidence contradicts one, or parameters were exchanged."""
        self._cached.clear()
        self._size = 0

    def run(
        self, key: CallKey, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: ForwardContext
    ) -> Tensor | None:
        """Run an operation by its cached decision; None, with nothing done, where there is none."""
        # The key is the torch function, and the `id` of its first tracked argument.
        for decision in self._cached.get(key, ()):
            rows = decision.data_of(args, kwargs)
            if rows is not None:
                if not torch.is_grad_enabled() or forward.resized is not None or _torch.in_backward():
                    return None
                return decision.run(key[0], rows, forward)
        return None

    def store(self, key: CallKey, operation: Operation, plan: ByRule, use: ParamUse) -> None:
        """Store a rule's plan as the decision for this form of arguments, if it follows from the form alone."""
        forward = use.forward
        is_cacheable = plan.rows.layout is torch.strided and _is_of_form(operation, plan)
        if forward.batch_size < 2 or _torch.in_backward() or not is_cacheable:
            # With one sample every axis may hold it: what is met then says nothing about more.
            return
        args, kwargs, entry = operation.args, operation.kwargs, rule_for(operation.name)
        forms = [_form_of(item) for item in (*args, *kwargs.values())]
        if entry is None or any(form is NotImplemented for form in forms):
            return
        decision = next((one for one in self._cached.get(key, ()) if one.data_of(args, kwargs) is not None), None)
        if decision is None or decision.rule is not entry[0]:
            if self._size >= _MOST:
                self.forget()
            decision = _cached_decision(operation, plan, entry[0], forms)
            decisions = self._cached[key]
            decisions[:] = [decision, *(other for other in decisions if other.data_of(args, kwargs) is None)]
            self._size += 1
        decision.calls[forward.visits[decision.visits]] = _KnownCall(use.site, plan.known)


def _cached_decision(operation: Operation, plan: ByRule, rule: Rule, forms: Sequence[Any]) -> _CachedDecision:
    """Return the cache entry of a decision: of its data the form alone."""
    args, kwargs, data = operation.args, operation.kwargs, plan.rows
    position = next(number for number, item in enumerate((*args, *kwargs.values())) if item is data)
    captured = plan.captured
    return _CachedDecision(
        name=plan.name,
        rule=rule,
        visits=counted_as(key_of(operation.tracked, operation.name)),
        objects=tuple(_DATA if number == position else form for number, form in enumerate(forms)),
        positional=len(args),
        names=tuple(kwargs),
        place=position,
        form=forms[position],
        values=[None if item is data else item for item in plain(args)],
        keywords={name: None if item is data else item for name, item in plain(kwargs).items()},
        rows=position if position < len(args) else list(kwargs)[position - len(args)],
        saves=bool(plan.saved),
        product=plan.is_product,
        plain=all(type(one.origin.value) is Tensor for one in operation.tracked),
        targets=plan.targets,
        factors=captured.factors,
        dims=captured.num_batch_dims,
        order=captured.order,
        alike=plan.alike,
    )


_DATA: Final = object()


def _past_overrides(func: Callable[..., Any], values: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Run an operation past the overrides of its parameters' classes."""
    with _torch.subclasses_off():
        return func(*values, **keywords)


def _maps_as_ever(rows: Tensor, sizes: tuple[int, ...], known: int, forward: ForwardContext) -> list[RowMap]:
    """Return the row maps of data at a call whose form is cached; empty where its rows came in another order."""
    if not rows.requires_grad:
        # Where there are maps, data outside the graph is in the samples' own order.
        if known < 0 or forward.around.rows.samples_of(rows) is not None:
            return []
        if forward.batch_size > 1:
            return candidates_along(known, sizes, forward.batch_size, forward.batch_axis)
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


def _alike(operation: Operation, plan: ByRule, forward: ForwardContext) -> OperationForm | None:
    """Return the key of operations whose captures differ in nothing but the parameters: see `ParamUse.alike`."""
    if plan.captured.form not in _TOGETHER or plan.captured.order or not _is_of_form(operation, plan):
        return None
    if any(not tracked.origin.value.is_contiguous() for tracked in operation.tracked):
        return None
    arguments = [*enumerate(operation.args), *operation.kwargs.items()]
    # Of data in the graph and outside it the factors are the same.
    forms = [(key, _form_of(item)) for key, item in arguments if type(item) is not TrackedTensor]
    form = [(key, (one.dims, one.dtype, one.layout) if type(one) is _DataForm else one) for key, one in forms]
    values = [(key, item.origin.value) for key, item in arguments if type(item) is TrackedTensor]
    parameter_forms = [(key, value.shape, value.dtype, value.device) for key, value in values]
    if any(part is NotImplemented for _, part in form):
        return None
    elements = sum(value.numel() for _, value in values)
    return forward.around.sites.forms.setdefault(
        (rule_for(operation.name), tuple(form), tuple(parameter_forms)), OperationForm(elements)
    )


def _form_of(item: Any) -> Any:
    """Return what an argument must be for a decision to hold: itself, or the form of data."""
    # Not implemented where it is a container of tensors, or an object whose value is not its own.
    kind = type(item)
    if kind is TrackedTensor or kind in _VALUES:
        return item
    if kind is Tensor:
        return _DataForm(item.dim(), item.dtype, item.requires_grad, item.layout)
    if (kind is tuple or kind is list or kind is torch.Size) and all(type(part) is int for part in item):
        return tuple(item)
    return NotImplemented


def _is_equal(item: Any, cached: Any) -> bool:
    """Return whether an argument that is another object than before is of the same form: a number, or numbers."""
    kind = type(item)
    if kind in _VALUES:
        return kind is type(cached) and bool(item == cached)
    return (kind is tuple or kind is list or kind is torch.Size) and type(cached) is tuple and tuple(item) == cached
