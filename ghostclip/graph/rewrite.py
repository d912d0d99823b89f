"""The private step as one graph: sums over samples are replaced by factors, and norms and clipped sums added.

Shape letters: B samples, G clip groups.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, cast

import torch
from torch import Tensor, fx

from ghostclip import _torch
from ghostclip.clipping.norms import GroupNorms, cross_terms
from ghostclip.clipping.policies import ClipPolicy, Layout, finite_samples
from ghostclip.factors import Factor, Outer, Permuted, SquaredNorm
from ghostclip.graph.axes import SIZES_ALONE, Axes, first_of, shape_of
from ghostclip.graph.forms import Joint, Kept, have_freed_kept, kept, most_held, side_by_side
from ghostclip.graph.refusal import NoGraphError
from ghostclip.graph.regions import Regions
from ghostclip.graph.sums import Reduction, Sum, Value, linear
from ghostclip.graph.trace import Inputs, Traced, first_line, operation
from ghostclip.kernels import reads, switch
from ghostclip.kernels.precision import full_precision


@dataclass(frozen=True)
class Clipping:
    """How samples are clipped.

    Attributes:
        policy: The policy.
        layout: Its clip groups.
        masks: Whether samples that are not certain are taken out of factors, where no value may be read afterwards.
    """

    policy: ClipPolicy
    layout: Layout
    masks: bool


class _Factored(fx.Interpreter):
    """Runs a traced graph and keeps factors where sums over samples would be."""

    def __init__(self, graph: fx.GraphModule, axes: Axes) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._axes = axes

    def run_node(self, n: fx.Node) -> Any:
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
        return Reduction(n.target, values[0], values[1], self._axes.batch_size).run()

    def _valued(self, item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        return Value(self.env[item], self._axes.layouts.get(item))

    def _after_sums(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if any(parent in self._axes.depends and parent not in self._axes.summed for parent in n.all_input_nodes):
            raise NoGraphError(f"{n.target} brings a sum over samples and samples themselves together: they mix")
        if operation(n) in _INTO and not _is_zero(n.args[0]):
            raise NoGraphError(f"{n.target} adds to a sum over samples what belongs to no sample")
        value = n.meta.get("val")
        return linear(n.target, args, kwargs, value.shape if isinstance(value, Tensor) else None)

    def _reduces(self, n: fx.Node) -> bool:
        """Return whether a node has a sample axis before it and none behind it."""
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
    """Return whether a value is zeros, whatever else is put in its place: a sum over samples may stand there."""
    name = operation(node) if isinstance(node, fx.Node) else ""
    if name in ("full", "new_full", "full_like"):
        return node.args[1] == 0 if name == "full" else node.args[-1] == 0
    return name in ("zeros", "new_zeros", "zeros_like") or (name in _INTO and _is_zero(node.args[0]))


def factors_of(traced: Traced, axes: Axes, inputs: Inputs, flat: Sequence[Tensor]) -> tuple[Any, Kept, Any]:
    """Run a traced graph up to the factors of every gradient.

    Args:
        traced: The graph.
        axes: The sample axes of its values.
        inputs: What it was traced on.
        flat: Its inputs.

    Returns:
        The losses; factors by parameter, none for one that is not used; and what else is returned.

    Raises:
        NoGraphError: A gradient is no sum over samples.
    """
    losses_B, *rest = _Factored(traced.graph, axes).run(*flat)
    count = len(inputs.trainable)
    found: Kept = {}
    for name, grad in zip(inputs.trainable, rest[:count], strict=True):
        if isinstance(grad, Tensor):
            raise NoGraphError(f"{name}: its gradient is no sum over samples")
        found[name] = [] if grad is None else grad.factors
    return losses_B, found, rest[count:]


def _clipped_sum(found: list[Factor], coef_B: Tensor, keep_B: Tensor | None, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the clipped sums of parameters whose gradients lie side by side, their factors dropped one by one."""
    dtype, entries = torch.promote_types(like[0].dtype, torch.float32), [tensor.numel() for tensor in like]
    shape = like[0].shape if len(like) == 1 else (sum(entries),)
    total = torch.zeros(shape, dtype=dtype, device=like[0].device)
    coef_B, is_new = coef_B.to(dtype), True
    while found:
        factor = found.pop(0)
        kept = factor if keep_B is None else factor.masked(keep_B)
        add = kept.write_clipped_sum_ if is_new else kept.add_clipped_sum_
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
    """Return the private step of a batch as a function of tensors.

    Args:
        traced: The graph of forward, loss and backward.
        axes: The sample axes of its values.
        inputs: What it was traced on.
        clipping: How samples are clipped.
        regions: Takes what recurs from layer to layer; None where nothing is to be compiled apart.

    Returns:
        A function of which samples count, ``(B,)`` bool, and of the graph's inputs. It returns which samples are
        certain, ``(B,)`` bool, the losses ``(B,)``, norms and coefficients of each group, ``(B,)`` each, the clipped
        sum of every trainable parameter, and the tensors of what else the loss function returned.
    """
    room = most_held(traced.graph)
    have_freed_kept(room)

    def step(valid_B: Tensor, *flat: Tensor) -> list[Tensor]:
        losses_B, found, extra = factors_of(traced, axes, inputs, flat)
        own, group_of = dict(zip(inputs.trainable, flat, strict=False)), clipping.layout.group_of
        factors = side_by_side(kept(found, room), lambda name: (group_of.get(name, 0), own[name].dtype))
        total = _norms(factors, clipping.layout, regions)
        certain_B = total.certain_B(axes.batch_size).to(valid_B.device)
        norm_GB = total.norm_GB(axes.batch_size, valid_B.device)
        certain_B = certain_B & finite_samples(norm_GB)
        coef_GB = clipping.policy.coefficients(norm_GB, clipping.layout.bounds)
        coef_GB = [torch.where(valid_B & certain_B, coef_B, 0.0) for coef_B in coef_GB]
        keep_B = valid_B & certain_B if clipping.masks else None
        sums: dict[str, Tensor] = {}
        for names in reversed(list(factors)):
            coef_B, like = coef_GB[group_of.get(names[0], 0)], [own[name] for name in names]
            sums.update(zip(names, _clipped_sum(factors.pop(names), coef_B, keep_B, like), strict=True))
        return [
            certain_B | ~valid_B,
            losses_B,
            *(*norm_GB, *coef_GB),
            *(sums[name] for name in inputs.trainable),
            *extra,
        ]

    return step


def _norms(factors: Joint, layout: Layout, regions: Regions | None) -> GroupNorms:
    """Return the norms of samples from the factors of all parameters."""
    total = GroupNorms(layout.group_of)
    for (name, *_), found in factors.items():
        for factor in found:
            core = factor.inner if isinstance(factor, Permuted) else factor
            if regions is None or type(core) is not Outer or core.sizes[0] <= 1:
                total.add_norm_of(name, factor)
                continue
            form = core.shape, core.slots
            total.add(name, regions.call(form, partial(_squared_norm, *form), core.a_NTI, core.g_NTO))
        crossed = cross_terms(found)
        if crossed is not None:
            total.add(name, crossed)
    return total


def _squared_norm(shape: Sequence[int], slots: int, a_NTI: Tensor, g_NTO: Tensor) -> SquaredNorm:
    return Outer(a_NTI, g_NTO, shape=shape, slots=slots).sqnorm()


def rewritten(
    step: Callable[..., list[Tensor]], inputs: Sequence[Tensor], regions: Regions | None = None
) -> fx.GraphModule:
    """Trace a private step into one functional graph.

    Args:
        step: As `private_step` returns it.
        inputs: Tensors of the shapes it is traced for.
        regions: What the step was made with.

    Returns:
        The graph.

    Raises:
        NoGraphError: It cannot be written as one.
    """
    try:
        with torch.no_grad(), full_precision(), reads.none(), switch.using("off"), _torch.overrides_off():
            # Operations made of others are taken apart first: some change in place what has no other form.
            first = _torch.traced(step, inputs)
            graph = _functional(first if regions is None else regions.inlined(first), inputs)
            if regions is not None:
                regions.placed(graph, _functional)
    except NoGraphError:
        raise
    except Exception as problem:
        raise NoGraphError(
            f"its factors cannot be written as a graph ({type(problem).__name__}: {first_line(problem)})"
        ) from problem
    graph.recompile()
    return graph


def _functional(step: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Return the graph of operations, as it is compiled."""
    graph = _torch.traced(_torch.functional(step), inputs)
    for node in list(graph.graph.nodes):
        if operation(node) == "addmm":
            _bias_apart(graph.graph, node)
    _without_steps_between(graph.graph)
    for node in list(graph.graph.nodes):
        # What a view was of may lie otherwise once it is computed.
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif operation(node) == "sum":
            _widened(graph.graph, node)
    graph.recompile()
    return graph


_SAME: Final = frozenset({"detach", "alias"})
_RESHAPES: Final = frozenset({"view", "unsafe_view", "reshape", "squeeze", "unsqueeze"})
_TURNS: Final = frozenset({"t", "transpose", "permute"})


def _without_steps_between(graph: fx.Graph) -> None:
    """Have every view start from what was computed: a compiler follows each step of a chain several times."""
    for node in list(graph.nodes):
        name = operation(node)
        if name in _SAME:
            _replaced(node, first_of(node))
        elif name in _RESHAPES:
            source, shape = first_of(node), shape_of(node)
            if operation(source) in _RESHAPES:
                source = first_of(source)
                node.target, node.args, node.kwargs = torch.ops.aten.reshape.default, (source, list(shape)), {}
            if shape == shape_of(source):
                _replaced(node, source)
        elif name in _TURNS:
            axes, source = _axes_of(node), first_of(node)
            if operation(source) in _TURNS:
                axes, source = [_axes_of(source)[axis] for axis in axes], first_of(source)
            node.target, node.args, node.kwargs = torch.ops.aten.permute.default, (source, axes), {}
            if axes == sorted(axes):
                _replaced(node, source)
    graph.eliminate_dead_code()


def _axes_of(node: fx.Node) -> list[int]:
    """Return from which axes those of a transposed tensor come."""
    axes, name = list(range(len(shape_of(node)))), operation(node)
    if name == "permute":
        return [axis % len(axes) for axis in cast("Sequence[int]", node.args[1])]
    if len(axes) > 1:
        one, two = cast("tuple[int, int]", node.args[1:] or (0, 1))
        axes[one], axes[two] = axes[two], axes[one]
    return axes


def _replaced(node: fx.Node, source: fx.Node) -> None:
    """Have all but the outputs take another node: an input that is returned is returned as a tensor of its own."""
    node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def _bias_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Have a bias added where a product is read: by itself, a product on a CPU would be written once more for it."""
    bias, *factors = cast("tuple[fx.Node, ...]", node.args)
    shape, value = shape_of(node), node.meta["val"]
    # Of 16 bits the product would be rounded before the bias is added.
    if node.kwargs or value.device.type != "cpu" or value.element_size() < 4 or shape_of(bias) != shape[1:]:
        return
    with graph.inserting_before(node):
        product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
        # Inductor puts a sum that stands right behind its product back to where it was.
        apart = graph.call_function(torch.ops.aten.reshape.default, (product, [1, *shape]))
        added = graph.call_function(torch.ops.aten.add.Tensor, (apart, bias))
    node.target, node.args = torch.ops.aten.reshape.default, (added, list(shape))
    product.meta = dict(node.meta)
    apart.meta = added.meta = {**node.meta, "val": value.unsqueeze(0)}


_SHORT: Final = 256
"""Numbers that are added up in float32, at most: Inductor adds up thousands in a row in each lane of a processor, and a
sum of equal numbers comes out a thousand roundings too small, which error bounds do not know of."""


def _widened(graph: fx.Graph, node: fx.Node) -> None:
    """Have a long sum on a CPU run in float64."""
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
