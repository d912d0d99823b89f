"""The private step as one graph: sums over samples are replaced by factors, and norms and clipped sums added.

Shape letters: B samples, G clip groups.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, fx

from ghostclip import _torch
from ghostclip.clipping.norms import GroupNorms, cross_terms
from ghostclip.clipping.policies import ClipPolicy, Layout, finite_samples
from ghostclip.factors import Factor, Outer, Permuted, SquaredNorm
from ghostclip.graph.axes import SIZES_ALONE, Axes, first_of
from ghostclip.graph.forms import Joint, Kept, kept, peak_of_graph, reuse_freed_memory, side_by_side
from ghostclip.graph.simplify import Regions, simplified
from ghostclip.graph.sums import SampleSum, Sum, Value, linear
from ghostclip.graph.trace import Inputs, NoGraphError, Traced, first_line, operation
from ghostclip.kernels import runtime
from ghostclip.kernels.products import full_precision

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
    reuse_freed_memory(room)

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


def _norms(factors: Joint, layout: Layout, regions: Regions | None) -> GroupNorms:
    """Return the norms of samples from the factors of all parameters."""
    total = GroupNorms(layout.group_of)
    forms = Counter(_form_of(factor) for uses in factors.values() for factor in uses)
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
    core = factor.inner if isinstance(factor, Permuted) else factor
    assert isinstance(core, Outer)
    return core.a_NTI, core.g_NTO


def _squared_norm(slots: int, a_NTI: Tensor, g_NTO: Tensor) -> SquaredNorm:
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
    return simplified(_torch.traced(_torch.functional(step), inputs))
