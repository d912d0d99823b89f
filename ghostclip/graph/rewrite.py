"""The private step as one graph: sums over samples are replaced by factors, and norms and clipped sums added.

What a compiler would follow, compute or copy more than once is there once. Values alone are looked at, not how they lie
in memory: that the compiler decides.

*Regions* are parts of a private step that recur from layer to layer (the norms of a weight), compiled once. While the
step is traced, a call of a region is one operation of our own: it takes tensors and the region's number, and is known
by the shapes of its results alone. In the end the region is a graph inside the graph, and called as often.

Each gradient is kept until the clipped sum as two factors, or as the gradients of all samples. Forming the gradients of
samples costs the operations of an ordinary weight gradient, which they replace: their norms and their weighted sum read
them once each. A Gram matrix of factors costs products beside it, and many small operations. So gradients are formed
where they are little larger than the factors, as long as what is kept fits in the memory that an ordinary step takes.

Shape letters: B samples, G clip groups.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import Any, Final, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ghostclip import _torch
from ghostclip.clipping.norms import GroupNorms, cross_terms
from ghostclip.clipping.passes import smaller_form
from ghostclip.clipping.policies import ClipPolicy, Layout, finite_samples
from ghostclip.factors import Dense, Factor, Outer, Permuted, SquaredNorm, joined
from ghostclip.graph.sums import SampleSum, Sum, Value, linear
from ghostclip.graph.trace import (
    SIZES_ALONE,
    Axes,
    Inputs,
    NoGraphError,
    Traced,
    first_line,
    first_of,
    operation,
    outputs_of,
    shape_of,
    values_of,
)
from ghostclip.kernels import runtime
from ghostclip.kernels.products import full_precision

_SAME: Final = frozenset({"detach", "alias"})
_RESHAPES: Final = frozenset({"view", "unsafe_view", "reshape", "squeeze", "unsqueeze"})
_TURNS: Final = frozenset({"t", "transpose", "permute"})
_VIEWS: Final = _SAME | _RESHAPES | _TURNS | {"slice", "select", "expand", "split", "split_with_sizes", "unbind"}


def simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph simplified in place, as it is compiled."""
    for node in list(graph.graph.nodes):
        if operation(node) == "addmm":
            _add_bias_by_itself(graph.graph, node)
    for node in list(graph.graph.nodes):
        _from_what_was_computed(node)
        _in_one_copy(node)
    graph.graph.eliminate_dead_code()
    _once_each(graph.graph)
    for node in list(graph.graph.nodes):
        # What a view was of may lie otherwise once it is computed.
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif operation(node) == "sum":
            _widened(graph.graph, node)
    graph.recompile()
    return graph


def _from_what_was_computed(node: fx.Node) -> None:
    """Replace a chain of views by one view of the computed value, which a compiler follows once."""
    name = operation(node)
    if name in _SAME:
        _replaced(node, first_of(node))
    elif name in _RESHAPES:
        source, shape = first_of(node), shape_of(node)
        if operation(source) in _RESHAPES:
            source = first_of(source)
            _becomes(node, torch.ops.aten.reshape.default, source, list(shape))
        if shape == shape_of(source):
            _replaced(node, source)
    elif name in _TURNS:
        axes, source = _axes_of(node), first_of(node)
        inner = first_of(source) if operation(source) == "clone" else source
        if operation(inner) in _TURNS:
            both = [_axes_of(inner)[axis] for axis in axes]
            # A copy between the two stays, unless what it was made for is undone.
            if inner is source or both == sorted(both):
                axes, source = both, first_of(inner)
        _becomes(node, torch.ops.aten.permute.default, source, axes)
        if axes == sorted(axes):
            _replaced(node, source)


def _in_one_copy(node: fx.Node) -> None:
    """Replace concatenated steps that are permuted afterwards by one stack in the order that is read."""
    name = operation(node)
    if name == "cat" and len(pieces := cast("list[fx.Node]", node.args[0])) > 1:
        axis = cast("int", node.args[1]) % len(shape_of(node)) if len(node.args) > 1 else 0
        rest = shape_of(node)[:axis] + shape_of(node)[axis + 1 :]
        whole = [first_of(piece) if operation(piece) in _RESHAPES else piece for piece in pieces]
        if shape_of(node)[axis] == len(pieces) and all(shape_of(piece) == rest for piece in whole):
            _becomes(node, torch.ops.aten.stack.default, whole, axis)
    elif name == "clone" and node.kwargs.get("memory_format") == torch.contiguous_format:
        source = first_of(node)
        if source.meta["val"].is_contiguous() and source.op == "call_function":
            _replaced(node, source)
        elif operation(source) == "permute" and operation(first_of(source)) == "stack":
            pieces, *along = cast("tuple[list[fx.Node], int]", first_of(source).args)
            axes, axis = _axes_of(source), along[0] % len(shape_of(node)) if along else 0
            if [other for other in axes if other != axis] == [other for other in sorted(axes) if other != axis]:
                _becomes(node, torch.ops.aten.stack.default, pieces, axes.index(axis))


def _becomes(node: fx.Node, target: Any, *args: fx.node.Argument) -> None:
    """Change a node's operation and arguments."""
    node.target, node.args, node.kwargs = target, args, {}


def _axes_of(node: fx.Node) -> list[int]:
    """Return the permutation of a transposed tensor: axis i of the result is axis `[i]` of the source."""
    axes, name = list(range(len(shape_of(node)))), operation(node)
    if name == "permute":
        return [axis % len(axes) for axis in cast("Sequence[int]", node.args[1])]
    if len(axes) > 1:
        one, two = cast("tuple[int, int]", node.args[1:] or (0, 1))
        axes[one], axes[two] = axes[two], axes[one]
    return axes


def _once_each(graph: fx.Graph) -> None:
    """Merge equal operations on the same values, as of layers that share an input."""
    # Outputs are left as they are: each sum has memory of its own.
    returned = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in returned and (operation(node) in _VIEWS or node.target is operator.getitem):
            returned.update(node.all_input_nodes)
    known: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in returned or not _torch.is_repeatable(node.target):
            continue
        key = node.target, repr((node.args, node.kwargs))
        same = known.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _replaced(node: fx.Node, source: fx.Node) -> None:
    """Replace a node in all but the outputs: an input that is returned is returned as a tensor of its own."""
    node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def _add_bias_by_itself(graph: fx.Graph, node: fx.Node) -> None:
    """Split a product with a bias in two, so that a CPU adds the bias where the product is read."""
    bias, *factors = cast("tuple[fx.Node, ...]", node.args)
    shape, value = shape_of(node), node.meta["val"]
    # Of 16 bits the product would be rounded before the bias is added.
    if node.kwargs or value.device.type != "cpu" or value.element_size() < 4 or shape_of(bias) != shape[1:]:
        return
    with graph.inserting_before(node):
        product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
        # Inductor puts a sum that stands right behind its product back to where it was.
        reshaped = graph.call_function(torch.ops.aten.reshape.default, (product, [1, *shape]))
        added = graph.call_function(torch.ops.aten.add.Tensor, (reshaped, bias))
    node.target, node.args = torch.ops.aten.reshape.default, (added, list(shape))
    product.meta = dict(node.meta)
    reshaped.meta = added.meta = {**node.meta, "val": value.unsqueeze(0)}


_SHORT: Final = 256
"""Numbers that are added up in float32, at most: Inductor adds up thousands in a row in each lane of a processor, and a
sum of equal numbers comes out a thousand roundings too small, which error bounds do not know of."""


def _widened(graph: fx.Graph, node: fx.Node) -> None:
    """Let a long sum on a CPU run in float64."""
    values = first_of(node).meta["val"], node.meta["val"]
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return
    if values[0].numel() <= _SHORT * max(1, values[1].numel()):
        return
    with graph.inserting_after(node):
        narrow = graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32))
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
    narrow.meta, node.meta = dict(node.meta), {**node.meta, "val": values[1].double()}
    node.kwargs = {**node.kwargs, "dtype": torch.float64}


_LIBRARY: Final = torch.library.Library("ghostclip", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int number) -> Tensor[]")
_CALL: Final = torch.ops.ghostclip.region.default
_numbers: Final = count()


class _Region:
    """A function of tensors of one form."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.number = function, next(_numbers)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the function and return the tensors of its result; the other values are kept for `result`."""
        self._leaves, self._spec = _torch.tree_flatten(self._function(*tensors))
        # Of a tuple, and no list, a compiler keeps what is known of its tensors.
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, Tensor))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result that has these tensors, once it has run."""
        values = iter(tensors)
        return _torch.tree_unflatten([next(values) if isinstance(x, Tensor) else x for x in self._leaves], self._spec)


_known: Final[WeakValueDictionary[int, _Region]] = WeakValueDictionary()


def _shapes(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    """Return empty tensors of a region's results, for tracing."""
    return [torch.empty_like(result) for result in _known[number].run(*inputs)]


torch.library.register_fake("ghostclip::region", _shapes, lib=_LIBRARY)


class Regions:
    """The regions of one step."""

    def __init__(self) -> None:
        self._regions: dict[Hashable, _Region] = {}

    def call(self, what: Hashable, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a region, while tracing."""
        # `what` is equal for functions that do the same with tensors of equal sizes, strides and dtypes. Tensors of the
        # result share no memory, with each other or with the arguments.
        region = self._regions.setdefault(what, _Region(function))
        _known[region.number] = region
        return region.result(_CALL(list(tensors), region.number))

    def insert(self, graph: fx.GraphModule, final: Callable[..., fx.GraphModule]) -> None:
        """Insert the graphs of regions where they are called, in place; ``final`` lowers a traced graph."""
        names: dict[int, str] = {}
        for node in [node for node in graph.graph.nodes if node.target is _CALL]:
            arguments, number = node.args
            if number not in names:
                # By place, not by number: a step has the same names in every process.
                names[number] = f"region_{len(names)}"
                inputs = [argument.meta["val"] for argument in arguments]
                graph.add_submodule(names[number], final(_torch.traced(_known[number].run, inputs), inputs))
            with graph.graph.inserting_before(node):
                part = graph.graph.get_attr(names[number])
                call = graph.graph.call_function(_torch.region_call(), (part, names[number], *arguments))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)


LARGER: Final = 2
"""How many times the size of its two factors a gradient may have that is formed: beyond, on a CPU, writing and reading
it twice takes longer than the Gram of the factors."""

SMALL: Final = 4096
"""Entries of a parameter, such as a bias, up to which its gradients are put side by side with those of others: one norm
and one sum for all of them. To start an operation takes longer than it does, and each is one more to compile."""

Kept = dict[str, list[Factor]]
SideBySide = dict[tuple[str, ...], list[Factor]]
"""Factors of parameters whose gradients of a sample lie side by side, by their names."""


def kept(factors: Kept, room: int) -> Kept:
    """Return factors as they are stored until the clipped sum: concatenated, or formed where that is quicker."""
    # `room`: bytes that all of them may take where larger forms are quicker.
    forms = {
        name: [_formed(use) for use in (joined(uses) if len(uses) > 1 else uses)] for name, uses in factors.items()
    }
    positions = [(name, index) for name, uses in forms.items() for index in range(len(uses))]
    wanted = [(name, index) for name, index in positions if _growth(forms[name][index]) <= LARGER]
    for name, index in sorted(wanted, key=lambda at: _growth(forms[at[0]][at[1]])):
        factor = forms[name][index]
        forms[name][index] = _formed(factor, always=True)
        if _bytes_of(part for uses in forms.values() for part in uses) > room:
            forms[name][index] = factor
    return forms


def side_by_side(by_name: Kept, alike: Callable[[str], Hashable]) -> SideBySide:
    """Concatenate the gradients of small parameters, one row per sample, so that one norm and sum serve all."""
    # `alike` returns, by name, what must be equal for all that are joined.
    small: defaultdict[Hashable, list[str]] = defaultdict(list)
    rest: SideBySide = {}
    for name, factors in by_name.items():
        if len(factors) == 1 and type(factors[0]) is Dense and factors[0].numel() <= SMALL:
            tensor = factors[0].grad_BP
            small[alike(name), tensor.dtype, tensor.device].append(name)
        else:
            rest[(name,)] = factors
    for names in small.values():
        rows = [factor.reshaped((factor.numel(),)).materialize() for name in names for factor in by_name[name]]
        rest[tuple(names)] = by_name[names[0]] if len(names) == 1 else [Dense(torch.cat(rows, 1))]
    return rest


def _formed(factor: Factor, *, always: bool = False) -> Factor:
    """Return the formed gradients where `smaller_form` would, transposed where a CPU forms that more quickly."""
    if type(factor) is Outer and factor.slots == 1 and len(factor.shape) == 2 and factor.sizes[0] > 1:
        _, inputs, outputs = factor.sizes
        if outputs > inputs and factor.a_NTI.device.type == "cpu" and (always or factor.stores_gradient()):
            return Permuted(smaller_form(factor.transposed(), always=always), (1, 0))
    return smaller_form(factor, always=always)


def _growth(factor: Factor) -> float:
    """Return how many times larger than its factors a gradient is; infinite for other factors."""
    factor = factor.inner if isinstance(factor, Permuted) else factor
    if type(factor) is not Outer or factor.batch_size == 0 or factor.sizes[0] <= 1:
        return float("inf")
    gradient = max(4, factor.a_NTI.element_size()) * factor.batch_size * factor.numel()
    return gradient / (factor.a_NTI.nbytes + factor.g_NTO.nbytes)


def _bytes_of(factors: Iterable[Factor]) -> int:
    """Return the bytes of factors, shared memory counted once."""
    memory: dict[int, int] = {}
    pending: list[object] = list(factors)
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            memory[_torch.memory_key(item)] = item.untyped_storage().nbytes()
        elif isinstance(item, Factor):
            pending += vars(item).values()
    return sum(memory.values())


def peak_of_graph(graph: fx.GraphModule) -> int:
    """Return the peak bytes of a graph's intermediate results, run in order; inputs and outputs are not counted."""
    nodes = list(graph.graph.nodes)
    sizes: dict[int, int] = {}
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for value in values_of(node):
            key = _torch.memory_key(value)
            sizes[key] = value.untyped_storage().nbytes()
            begin.setdefault(key, index)
            end[key] = index
        for value in (value for parent in node.all_input_nodes for value in values_of(parent)):
            end[_torch.memory_key(value)] = index
    inputs = [node for node in nodes if node.op != "call_function"]
    excluded = {_torch.memory_key(x) for node in [*inputs, *filter(None, outputs_of(graph))] for x in values_of(node)}
    change: defaultdict[int, int] = defaultdict(int)
    for key in sizes.keys() - excluded:
        change[begin[key]] += sizes[key]
        change[end[key] + 1] -= sizes[key]
    live = most = 0
    for index in sorted(change):
        live += change[index]
        most = max(most, live)
    return most


FEWEST: Final = 4
"""Gradients of one form from which their norms are compiled once: of fewer they are compiled with what is beside."""


@dataclass(frozen=True)
class Clipping:
    """How samples are clipped."""

    policy: ClipPolicy
    layout: Layout  # its clip groups


class _Factored(fx.Interpreter):
    """Interpreter of a traced graph that stores factors in the place of sums over samples."""

    def __init__(self, graph: fx.GraphModule, axes: Axes) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._axes = axes

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; where it sums over samples, put factors in the place of the sum."""
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if operation(n) in SIZES_ALONE:
            like, target = first_of(n).meta["val"], cast("Callable[..., Any]", n.target)
            return target(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs)
        if any(isinstance(leaf, Sum) for leaf in _torch.tree_leaves((args, kwargs))):
            return self._after_sums(n, args, kwargs)
        if not self._reduces(n):
            return super().run_node(n)
        if operation(n) in _INTO and not _is_zero(n.args[0]):
            raise NoGraphError(f"{n.target} adds samples to what belongs to no sample")
        values: Any = _torch.tree_map(self._valued, (n.args, n.kwargs), is_leaf=lambda item: isinstance(item, fx.Node))
        return SampleSum(n.target, values[0], values[1], self._axes.batch_size).run()

    def _valued(self, item: Any) -> Any:
        """Return a node's value with its sample axis; anything else as it is."""
        if not isinstance(item, fx.Node):
            return item
        return Value(self.env[item], self._axes.layouts.get(item))

    def _after_sums(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Apply an operation to sums over samples, factor by factor; refuse one that is not linear."""
        if any(parent in self._axes.depends and parent not in self._axes.summed for parent in n.all_input_nodes):
            raise NoGraphError(f"{n.target} brings a sum over samples and samples themselves together: they mix")
        if operation(n) in _INTO and not _is_zero(n.args[0]):
            raise NoGraphError(f"{n.target} adds to a sum over samples what belongs to no sample")
        value = n.meta.get("val")
        return linear(n.target, args, kwargs, value.shape if isinstance(value, Tensor) else None)

    def _reduces(self, n: fx.Node) -> bool:
        """Return whether a node has a sample axis before it and none after it."""
        if n in self._axes.summed:
            return True
        return any(user in self._axes.summed and user.target is operator.getitem for user in n.users)


# Operations that put values into their first argument, which must be zeros.
_INTO = (
    "index_put",
    "unsafe_index_put",
    "index_add",
    "scatter_add",
    "slice_scatter",
    "select_scatter",
    "put",
    "scatter",
)


def _is_zero(node: Any) -> bool:
    """Return whether a value is zeros, so that a sum over samples may replace it."""
    name = operation(node) if isinstance(node, fx.Node) else ""
    if name in ("full", "new_full", "full_like"):
        return node.args[1] == 0 if name == "full" else node.args[-1] == 0
    return name in ("zeros", "new_zeros", "zeros_like") or (name in _INTO and _is_zero(node.args[0]))


def factors_of(traced: Traced, axes: Axes, inputs: Inputs, flat: Sequence[Tensor]) -> tuple[Any, Kept, Any]:
    """Return the losses, the factors of every gradient by parameter, and the loss function's other results."""
    losses_B, *rest = _Factored(traced.graph, axes).run(*flat)
    count = len(inputs.trainable)
    factors: Kept = {}
    for name, grad in zip(inputs.trainable, rest[:count], strict=True):
        if isinstance(grad, Tensor):
            raise NoGraphError(f"{name}: its gradient is no sum over samples")
        factors[name] = [] if grad is None else grad.factors
    return losses_B, factors, rest[count:]


def _clipped_sum(factors: list[Factor], coef_B: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the clipped sums of parameters whose gradients are concatenated, their factors dropped one by one."""
    dtype, entries = torch.promote_types(like[0].dtype, torch.float32), [tensor.numel() for tensor in like]
    shape = like[0].shape if len(like) == 1 else (sum(entries),)
    total = torch.zeros(shape, dtype=dtype, device=like[0].device)
    coef_B, is_new = coef_B.to(dtype), True
    while factors:
        factor = factors.pop(0)
        add = factor.write_clipped_sum_ if is_new else factor.add_clipped_sum_
        add(coef_B, total)
        is_new = False
    if len(like) == 1:
        return [total]
    # Views of one part each: functionalization makes all of a split anew for every part.
    starts = accumulate(entries, initial=0)
    return [total.narrow(0, start, x.numel()).view(x.shape) for start, x in zip(starts, like, strict=False)]


def private_step(
    traced: Traced, axes: Axes, inputs: Inputs, clipping: Clipping, regions: Regions | None = None
) -> Callable[..., list[Tensor]]:
    """Return the private step of a batch as a function of ``(B,)`` which samples count, and of the graph's inputs."""
    # It returns which samples are certain, (B,) bool, the losses (B,), norms and coefficients of each group, (B,) each,
    # the clipped sum of every trainable parameter, and the tensors of the loss function's other results.
    room = peak_of_graph(traced.graph)

    def step(valid_B: Tensor, *flat: Tensor) -> list[Tensor]:
        losses_B, by_name, extra = factors_of(traced, axes, inputs, flat)
        parameters, group_of = dict(zip(inputs.trainable, flat, strict=False)), clipping.layout.group_of
        factors = side_by_side(kept(by_name, room), lambda name: (group_of.get(name, 0), parameters[name].dtype))
        total = _norms(factors, clipping.layout, regions)
        certain_B = total.certain_B(axes.batch_size).to(valid_B.device)
        norm_GB = total.norm_GB(axes.batch_size, valid_B.device)
        certain_B = certain_B & finite_samples(norm_GB)
        coef_GB = clipping.policy.coefficients(norm_GB, clipping.layout.bounds)
        coef_GB = [torch.where(valid_B & certain_B, coef_B, 0.0) for coef_B in coef_GB]
        sums: dict[str, Tensor] = {}
        for names in reversed(list(factors)):
            coef_B, like = coef_GB[group_of.get(names[0], 0)], [parameters[name] for name in names]
            sums.update(zip(names, _clipped_sum(factors.pop(names), coef_B, like), strict=True))
        return [
            certain_B | ~valid_B,
            losses_B,
            *(*norm_GB, *coef_GB),
            *(sums[name] for name in inputs.trainable),
            *extra,
        ]

    return step


def _norms(factors: SideBySide, layout: Layout, regions: Regions | None) -> GroupNorms:
    """Return the samples' norms from all factors, norms of one form as a region."""
    total = GroupNorms(layout.group_of)
    forms = Counter(_form_of(factor) for uses in factors.values() for factor in uses)
    # Names that share factors share a clip group: the first one stands for all.
    for (name, *_), uses in factors.items():
        for factor in uses:
            form = _form_of(factor)
            if regions is None or form is None or forms[form] < FEWEST:
                total.add_norm_of(name, factor)
            else:
                total.add(name, regions.call(form, partial(_squared_norm, form.slots), *_sides(factor)))
        crossed = cross_terms(uses)
        if crossed is not None:
            total.add(name, crossed)
    return total


class _Form(NamedTuple):
    """Strides, shapes, dtypes and slots that are equal for gradients whose norms are formed by the same operations."""

    sides: tuple[Hashable, ...]  # of inputs and output gradients
    slots: int


def _form_of(factor: Factor) -> _Form | None:
    """Return the form of a sum of outer products; None for other gradients, whose norms are few operations."""
    core = factor.inner if isinstance(factor, Permuted) else factor
    if type(core) is not Outer or core.sizes[0] <= 1:
        return None
    return _Form(tuple((x.shape, x.stride(), x.dtype, x.device) for x in _sides(core)), core.slots)


def _sides(factor: Factor) -> tuple[Tensor, Tensor]:
    """Return input and output gradient of a factor that is an outer product."""
    core = factor.inner if isinstance(factor, Permuted) else factor
    assert isinstance(core, Outer)
    return core.a_NTI, core.g_NTO


def _squared_norm(slots: int, a_NTI: Tensor, g_NTO: Tensor) -> SquaredNorm:
    """Return the squared norms of outer products; the function of a region."""
    shape = (slots, g_NTO.shape[2], a_NTI.shape[2])
    return Outer(a_NTI, g_NTO, shape=shape, slots=slots).sqnorm()


def rewritten(
    step: Callable[..., list[Tensor]], inputs: Sequence[Tensor], regions: Regions | None = None
) -> fx.GraphModule:
    """Trace a private step into one functional graph."""
    try:
        with torch.no_grad(), full_precision(), runtime.none(), runtime.using("off"), _torch.overrides_off():
            # Operations made of others are taken apart first: some change in place what has no other form.
            first = _torch.traced(step, inputs)
            graph = _functional(first, inputs)
            if regions is not None:
                regions.insert(graph, _functional)
    except NoGraphError:
        raise
    except Exception as problem:
        raise NoGraphError(
            f"its factors cannot be written as a graph ({type(problem).__name__}: {first_line(problem)})"
        ) from problem
    graph.recompile()
    return graph


def _functional(step: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function into a simplified graph without in-place operations."""
    return simplified(_torch.traced(_torch.functional(step), inputs))
