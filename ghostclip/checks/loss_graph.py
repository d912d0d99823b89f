"""The part of the graph between a loss and a model's outputs: what there has no place in a private training.

Proofs by gradients see which outputs a sample's loss depends on. They do not see the targets, which have no gradient,
nor parameters that belong to nobody's model.

A proved forward says which inner rows each row of an output leads to. A loss whose every way into the model leads
through such outputs is therefore proved by the gradient of these outputs alone; no layer runs backward again. So is
what a loop, or a method of the model, makes of one forward's outputs and hands to the next (an encoder, then a
decoder).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture import backward_entry
from ghostclip.capture.backward_entry import forward_at, is_output, leads_to_forward
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import hooks_at, hooks_of_others, hooks_set_on, refuse_changes
from ghostclip.capture.nodes import Edge, edge_of, nodes_behind, shape_at
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.row_maps import FOLDED, WHOLE, RowMap, candidates
from ghostclip.capture.sample_axis import LOST, USE_KEY, has_one_axis, sample_axis_at
from ghostclip.capture.substitution import gradients_at
from ghostclip.checks.linear_paths import PICKED, linear_ends, of_few_digits
from ghostclip.checks.probe import (
    Company,
    GradientSource,
    Start,
    Weights,
    repeated,
    roots_of,
    touches_others,
    weightings,
)
from ghostclip.errors import (
    BatchAxisError,
    LossReductionError,
    SampleMixingError,
    UncoveredParameterError,
    UnsupportedModelError,
)

# They put values side by side, or take some along an axis, and no other tensor has a part in it: an axis of two that
# they make is no axis of two samples. Expanding and repeating are not among them: a loss that pairs begins with these.
_NO_PAIRING: Final = re.compile(
    "(Cat|Stack|Slice|(Unsafe)?Split(WithSizes)?|Unbind|Unfold|Diagonal|AsStrided|ConstantPadNd|.*Pad[123]D|Topk|Sort"
    "|Kthvalue|Median|Mode|.*Pool[123]D(WithIndices)?|Upsample.*|Squeeze)Backward[0-9]+"
)
# Products, with the place of their left factor among what they were computed from: an axis of each factor is gone.
_PRODUCTS: Final = {
    "MmBackward0": 0,
    "BmmBackward0": 0,
    "AddmmBackward0": 1,
    "BaddbmmBackward0": 1,
    "CdistBackward0": 0,
    "EuclideanDistBackward0": 0,
}
_EXPAND: Final = "ExpandBackward0"
_PICKING: Final = frozenset({"IndexSelectBackward0", "GatherBackward0"})
# Where products keep a factor that may be outside the graph.
_FACTORS: Final = ("other", "self", "tensor1", "tensor2", "weight")
_MULTIPLYING: Final = re.compile("(Mul|Div|Addcmul|Addcdiv|BinaryCrossEntropy.*)Backward[0-9]+")
# Of fewer samples weights may add up to a whole number by chance; so far from it they are by rounding, or deviations
# from a mean, which are rounded as the values were.
_FEWEST, _ROUNDED, _DEVIATIONS = 4, 1e-6, 1e-5
# A loss has some dozens of nodes; one that has more is proved by gradients alone.
MAX_NODES: Final = 4096
_TWO_AXES: Final = 2
_FOREIGN: Final = (
    "the loss goes through a trainable parameter of shape {} that is no part of the private model: its gradient would "
    "be neither clipped nor noised, and what it learns tells of the data. Put the module that holds it (an encoder in "
    "front, a head, a criterion with weights, a temperature) into the model that is made private; one that is not to "
    "be trained: requires_grad_(False), or call it under torch.no_grad(); what a generator has made: detach() it."
)
_CROSSED: Final = (
    "the loss pairs each of the {} samples with {} rows of something else: {}. If these are the targets, each sample's "
    "loss depends on all targets, and removing a sample changes every other's gradient: bring outputs and targets to "
    "one shape, as outputs.squeeze(1) of shape (B,) for targets (B,). If that axis holds no samples, it only happens "
    "to be as long: begin with a batch of another size."
)
_NORMALISED: Final = (
    "the loss multiplies the samples by weights that add up to {}: they were normalised over the batch (a softmax, "
    "w / w.sum(), w / w.mean(), an advantage less its mean), so that each sample's weight depends on the others, and "
    "no clipping bounds that. Weigh each sample by its own values and by public constants, as a baseline that is no "
    "statistic of this batch. Weights that are public: pass the function that computes the loss as criterion=, and "
    "the weights with the targets."
)
_HOOKED: Final = (
    "a hook between the model's outputs and a scalar loss has changed a gradient (before {}). It may bring samples "
    "together or follow their number; the graph that such a loss is read from does not show it. Write what it does "
    "into the samples' losses and call clipper.backward(losses), or set it on the output of a layer, in the model's "
    "forward. Hooks that only look at gradients may stay."
)
_FOLLOWING: Final = (
    "the loss goes through a scalar that the model computes over the batch, and whose gradient is neither a mean nor a "
    "sum of what each sample has: of half of the samples it is another one. It weighs samples by what is in the batch "
    "(a balancing loss of experts, which counts how many tokens each has; statistics of the batch that were detached; "
    "a mean over all tokens). Leave it out, or let the model return one value for each sample, shape (B,)."
)
# One on a tensor is called before the gradient is delivered to the layer that made it; one on the node itself, and what
# `register_backward_hook` sets, is called later, or changes what has passed the layer.
_ON_A_LAYER: Final = (
    "{place}: a hook stands on the node that computed {site} ({node}). It changes gradients beside the layer's "
    "parameters, which cannot follow it. Set it on the layer's output, output.register_hook, or on the module, "
    "register_full_backward_hook or register_full_backward_pre_hook."
)
_BESIDE: Final = (
    "{place}: the loss takes what {site} computes from inside the model (from a hook, say), where several rows belong "
    "to each of the {size} samples, and nothing has shown which. Let the model return it, or keep it in an attribute "
    "of a module."
)
# For an operation of a loss, by its number and name: how many samples there were when no other axis was as long.
Sizes = dict[tuple[int, str], int]
# On the node of a proved output: how its rows map to samples, by the number of the node's output.
_PROVED: Final = "ghostclip_proved_rows"
# How rows map to samples, in an order of the axes; empty where they are as they come.
_Rows = tuple[RowMap, tuple[int, ...]]


def refuse_beyond_outputs(
    roots: Sequence[Any], forward: ForwardContext, seen: Sizes, *, is_own: Callable[[nn.Parameter], bool]
) -> None:
    """Refuse trainable parameters of the loss itself, and a loss that compares samples with other samples' targets.

    Cost:
        One look at each node of the loss, none of the model's.
    """
    # A term of parameters alone, and one that is added to outputs of which the loss is a sum, has a gradient that does
    # not depend on the data. ``mse_loss`` of outputs (B, 1) and targets (B,) is the usual case of the other: it
    # compares all outputs with all targets. What gives it away is a second axis as long as the samples' own, which the
    # values it was made from do not have. An axis that had another length for another number of samples is no such
    # axis. `seen`: what was seen of earlier losses; noted in it. `is_own` tells the model's parameters, which are
    # guarded otherwise.
    nodes = above_outputs(map(edge_of, roots))
    for node, inputs in nodes:
        if not inputs and _is_foreign(node, is_own):
            ends = filter(leads_to_forward, linear_ends(map(edge_of, roots), is_output))
            refuse_foreign((node for node, inputs in above_outputs(ends) if not inputs), is_own)
            break
    size = forward.batch_size
    if size == 1:
        return
    looks = forward.unproven and not (forward.alone or forward.refusal)
    for number, (node, inputs) in enumerate(nodes):
        crossed = _crossed(node, inputs, number, size, seen) if inputs else ""
        if crossed and node.name() == _EXPAND and _meets_its_like(node, nodes, size):
            continue
        if crossed and forward.alone:
            seen[number, node.name()] = 0
        elif crossed:
            raise SampleMixingError(_CROSSED.format(size, size, crossed))
        if looks and _MULTIPLYING.fullmatch(node.name()):
            _refuse_normalised(node, forward)


def _refuse_normalised(node: Any, forward: ForwardContext) -> None:
    """Refuse a node that multiplies samples by weights whose sum shows that they were normalised over the batch."""
    dims = max((len(shape_at(edge) or ()) for edge in node.next_functions if edge[0] is not None), default=0)
    for weights in (_torch.saved_or(node, name, None) for name in _FACTORS):
        if not isinstance(weights, Tensor) or weights.requires_grad or not weights.is_floating_point():
            continue
        # Along another axis they are of features, of which there may be as many.
        along = next((axis for axis, count in enumerate(weights.shape) if count > 1), 0) + dims - weights.dim()
        total = _whole_sum(weights, forward.batch_size) if along in (0, forward.batch_axis) else ""
        if total:
            raise LossReductionError(_NORMALISED.format(total))


def _whole_sum(weights: Tensor, size: int) -> str:
    """Return the sum of the weights ("0", "1", "their number") where they look normalised over the batch, else ""."""
    if weights.numel() != size or size < _FEWEST or weights.layout is not torch.strided or 0 in weights.stride():
        return ""
    values = _torch.part_of(weights).detach().double().flatten().cpu()
    # What people write down has few digits, and may add up to anything; so may a few values of a table by chance.
    written = torch.tensor(list(map(of_few_digits, values.tolist())), dtype=torch.float64)
    if int((written.to(weights.dtype).double() != values).sum()) * 2 <= size:
        return ""
    off, largest, varied = float(values.sum()), float(values.abs().sum()), len(values.unique()) >= _FEWEST
    if abs(off) <= _DEVIATIONS * largest:
        return "0"
    whole = {"1": 1, "their number": size} if varied else {}
    return next((name for name, total in whole.items() if abs(off - total) <= _ROUNDED * largest), "")


def refuse_following(roots: Sequence[Any], forward: ForwardContext) -> None:
    """Refuse a loss through a model's scalar that depends on the batch as a whole, or whose function does."""
    if forward.refusal:
        raise LossReductionError(forward.refusal)
    pending, seen = list(map(edge_of, roots)) if forward.following else [], set[Any]()
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge[0] in seen or is_output(edge):
            continue
        if edge[0] in forward.following:
            raise LossReductionError(_FOLLOWING)
        seen.add(edge[0])
        pending += edge[0].next_functions


def has_hooks(roots: Sequence[Any], forward: ForwardContext, *, outputs_alone: bool = False) -> bool:
    """Return whether hooks stand between a loss and a model's outputs, or were set on outputs after the forward."""
    # Where no hook was set since the forward began, the graph is not looked at.
    if hooks_of_others() == forward.hooks_before:
        return False
    nodes = above_outputs(map(edge_of, roots))
    if not outputs_alone and any(any(hooks_at(node)) for node, _ in nodes):
        return True
    below = _outputs_below(map(edge_of, roots), nodes)
    numbers = [number for node, _ in below for on in hooks_at(node) for number in on]
    return any(isinstance(number, int) and number > forward.announced for number in numbers)


def hooks_below(roots: Sequence[Any], forward: ForwardContext) -> list[Any]:
    """Return the hooks between a loss and a model's outputs, and on these."""
    # Where no hook was set since the forward began, the graph is not looked at.
    if hooks_of_others() == forward.hooks_before:
        return []
    nodes = above_outputs(map(edge_of, roots))
    return hooks_set_on([node for node, _ in (*nodes, *_outputs_below(map(edge_of, roots), nodes))])


def _outputs_below(begun: Iterable[Edge], nodes: Sequence[tuple[Any, list[Edge]]]) -> list[Edge]:
    """Return the model's outputs that a part of a loss's graph begins from."""
    ends = [*begun, *(edge for _, inputs in nodes for edge in inputs)]
    return [edge for edge in ends if edge[0] is not None and is_output(edge)]


def refuse_changed_gradients(roots: Sequence[Any], forward: ForwardContext) -> None:
    """Refuse hooks between a scalar loss and a model's outputs once they change a gradient, in the backward."""
    for node, inputs in above_outputs(map(edge_of, roots)):
        # A leaf's node is whose it is: a gradient ends there.
        if inputs:
            refuse_changes(node, partial(LossReductionError, _HOOKED.format(node.name())))


def refuse_hooks_of_layers(roots: Iterable[Any], forward: ForwardContext) -> None:
    """Refuse hooks on the nodes of layers, where no layer's parameters can follow what they do to gradients.

    Cost:
        A look at every node of the graph.
    """
    for node in nodes_behind([edge_of(root)[0] for root in roots]):
        use = node.metadata.get(USE_KEY)
        if use is not None and any(_torch.hooks_of_node(node)):
            location, name = forward.around.describe(use.site.names[0]), type(node).__name__
            raise UnsupportedModelError(_ON_A_LAYER.format(place=location, site=use.site.describe(), node=name))


def above_outputs(begun: Iterable[Edge]) -> list[tuple[Any, list[Edge]]]:
    """Return the graph from values of a loss to a model's outputs, in an order that does not depend on the data."""
    # Each node once, with the values that it was computed from.
    pending = list(begun)[::-1]
    visited, nodes = set[Any](), list[tuple[Any, list[Edge]]]()
    while pending and len(visited) < MAX_NODES:
        edge = pending.pop()
        node = edge[0]
        if node is None or node in visited or is_output(edge):
            continue
        visited.add(node)
        inputs = [following for following in node.next_functions if following[0] is not None]
        nodes.append((node, inputs))
        pending += reversed(inputs)
    return nodes


def outputs_at(begun: Iterable[Edge]) -> set[Edge] | None:
    """Return the outputs that values of a loss are computed from directly; None where there is too much between."""
    edges = list(begun)
    nodes = above_outputs(edges)
    return None if len(nodes) >= MAX_NODES else set(_outputs_below(edges, nodes))


def _is_foreign(node: Any, is_own: Callable[[nn.Parameter], bool]) -> bool:
    """Return whether a node is the end of a trainable parameter that is no part of the model."""
    leaf = _torch.leaf_of(node)
    return isinstance(leaf, nn.Parameter) and leaf.requires_grad and not is_own(leaf)


def refuse_foreign(nodes: Iterable[Any], is_own: Callable[[nn.Parameter], bool] = lambda _: False) -> None:
    """Refuse trainable parameters that are no part of the model, among nodes that its loss was computed from."""
    for node in nodes:
        if _is_foreign(node, is_own):
            raise UncoveredParameterError(_FOREIGN.format(tuple(_torch.leaf_of(node).shape)))  # type: ignore[union-attr]


def _crossed(node: Any, inputs: Sequence[Edge], number: int, size: int, seen: Sizes) -> str:
    """Return "shapes becomes shape" if a node pairs all samples with as many rows, as (B, 1) with (B,); else ""."""
    after = shape_at((node, 0)) or ()
    axes, length = _axes_of_samples(after, size), 0
    if axes >= _TWO_AXES and (rows := sample_axis_at((node, 0))) is not None and rows is not LOST:
        # Features of any number are no samples' axis, and nothing is paired where one sample's values are picked.
        length = after[rows.axis] if rows.axis >= 0 else 0
        picks = rows.axis < 0 and node.name() in PICKED
        axes = 0 if picks else _axes_of_samples(after, size, length)
    if axes < _TWO_AXES:
        seen.setdefault((number, node.name()), size)
        return ""
    shapes = list(_remaining_shapes(node))
    most = max(_axes_of_samples(shape, size, length) for shape in shapes)
    if axes <= most or _NO_PAIRING.fullmatch(node.name()) or has_one_axis(node):
        return ""
    # A view has as many values as what it shows.
    is_view = any(prod(after) == prod(shape) for shape in shapes)
    if is_view or seen.get((number, node.name()), size) != size:
        return ""
    return f"{' and '.join(str(shape_at(edge) or ()) for edge in inputs)} becomes {after}"


def _meets_its_like(node: Any, nodes: Sequence[tuple[Any, list[Edge]]], size: int) -> bool:
    """Return whether an expanded value (``x.norm(...).expand_as(x)``) only meets values of the graph of its shape."""
    # Proofs by gradients tell their samples apart, as where torch broadcasts by itself.
    axes = _axes_of_samples(shape_at((node, 0)) or (), size)
    users = [inputs for _, inputs in nodes if any(one[0] is node for one in inputs)]
    others = [[one for one in inputs if one[0].name() != _EXPAND] for inputs in users]
    return bool(others) and all(
        any(_axes_of_samples(shape_at(o) or (), size) >= axes for o in among) for among in others
    )


def _remaining_shapes(node: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a node's inputs without the axes that it contracts or picks along."""
    # Of outputs (B, B) times targets (B, B), one axis of the result is the targets'.
    name = node.name()
    for number, edge in enumerate(node.next_functions):
        shape = tuple(shape_at(edge) or ()) if edge[0] is not None else None
        if shape is None:
            continue
        gone = set[int]()
        if name in _PRODUCTS and number >= _PRODUCTS[name]:
            is_right = number > _PRODUCTS[name] and name.endswith("mmBackward0")
            gone = {len(shape) - (2 if is_right else 1)}
        elif name in _PICKING:
            gone = {_torch.signed(_torch.saved(node, "dim")) % max(1, len(shape))}
        elif name == "IndexBackward0":
            # Rows that are picked along the samples' axis, ``x[arange, last]``, stay theirs.
            indices = _torch.saved(node, "indices")
            gone = {axis for axis, index in enumerate(indices) if index is not None and indices[0] is None}
        yield tuple(length for axis, length in enumerate(shape) if axis not in gone)


def _axes_of_samples(shape: Sequence[int], size: int, samples: int = 0) -> int:
    """Return how many axes are as long as each other and hold a whole number of positions of every sample."""
    # `samples`: the length of the samples' axis, where it is known: then only those as long as that.
    lengths = [length for length in shape if length and (length == samples if samples else length % size == 0)]
    return max(map(lengths.count, lengths), default=0)


class Unheard:
    """Receiver that ignores gradients: for backwards whose results are taken from the graph itself."""

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """Do nothing."""


def mark_proved(begun: Sequence[Start]) -> None:
    """Store on the nodes of a proved forward's outputs how their rows map to samples."""
    # `begun`: where the backwards of its proof began.
    for start in begun:
        if start.edge.tensor is not None and start.edge.tensor.grad_fn is not None:
            node, number = edge_of(start.edge.tensor)
            node.metadata.setdefault(_PROVED, {})[number] = start.row_map


def proved_outputs(begun: Sequence[Start]) -> dict[Edge, _Rows]:
    """Return the proved outputs, and layers beside them, behind values of a loss, with how their rows lie."""
    # An output's row map is as it was noted, a layer's as its rows were read.
    pending, seen, proved = [edge_of(start.edge.source) for start in begun], set[Edge](), dict[Edge, _Rows]()
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        row_map, use = edge[0].metadata.get(_PROVED, {}).get(edge[1]), edge[0].metadata.get(USE_KEY)
        if row_map is not None:
            proved[edge] = row_map, ()
        elif use is not None:
            proved[edge] = use.row_map, use.order
        else:
            pending += [one for one in edge[0].next_functions if one[0] is not None]
    return proved


def takes_outputs_alone(root: Any) -> bool:
    """Return whether a loss takes only outputs of compared forwards; refuse rows of unknown samples."""
    entries = proved_outputs([Start(GradientSource.of(root), WHOLE)])
    beside = [node.metadata[USE_KEY] for node, number in entries if number not in node.metadata.get(_PROVED, {})]
    for use in beside:
        if use.site.chosen is None and use.row_map.kind in FOLDED:
            place = use.forward.around.describe(use.site.names[0])
            raise BatchAxisError(_BESIDE.format(place=place, site=use.site.describe(), size=use.forward.batch_size))
    return not any(use.forward.compared for use in beside)


def separates_samples(
    begun: Sequence[Start], ends: dict[Edge, _Rows], weights: Sequence[Weights], *, batch_size: int, linear: bool
) -> bool:
    """Return whether each sample's values have zero gradients in other samples' rows, whoever these are.

    Cost:
        For each of them a backward from the values to the outputs; three where gradients differ.
    """
    # `linear`: all of the backward is torch's. False where some sample's values touch another sample's row, or another
    # one's gradient changes with them; hooks between, and on the outputs, have run.
    company = Company(linear=linear)
    # What leads to no layer, such as a parameter that is used outside the forward, is refused where it arrives.
    if ends and not all(_separates_samples(begun, ends, chosen, company, batch_size) for chosen in weights):
        return False
    if company.differing():
        for chosen in repeated(weights, batch_size):
            _separates_samples(begun, ends, chosen, company, batch_size)
    return not company.differing()


def input_separates_samples(tensor: Tensor, forward: ForwardContext, *, linear: bool) -> bool:
    """Return whether one sample's rows of an input lead to that sample's rows of earlier outputs alone.

    Cost:
        A few backwards, for an input in the graph, down to the outputs that it was computed from.
    """
    size, source = forward.batch_size, GradientSource.of(tensor)
    proved = proved_outputs([Start(source, WHOLE)])
    # Rows of a batch of another size belong to another number of samples, which the backward refuses.
    sizes = {edge: one.batch_size for edge in proved if (one := forward_at(edge[0])) is not None}
    ends = {edge: rows for edge, rows in proved.items() if sizes.get(edge) == size}
    if not ends:
        return True
    # One without rows of samples belongs to none of them. Of the first sample there is no gradient in some backwards.
    maps = candidates(tensor.shape, size, axis=forward.batch_axis) or [RowMap("one", 0, torch.tensor([1]))]
    weights = weightings(size, linear=linear)
    begun = ([Start(source, row_map)] for row_map in maps)
    return any(separates_samples(one, ends, weights, batch_size=size, linear=linear) for one in begun)


def _separates_samples(
    begun: Sequence[Start], ends: dict[Edge, _Rows], weights: Weights, company: Company, batch_size: int
) -> bool:
    """Run one weighted backward; return whether rows of samples with weight 0 get zeros."""
    roots, root_grads = roots_of(begun, batch_size, weights)
    with backward_entry.unseen():
        grads = gradients_at(roots, root_grads, list(ends))
    for index, (grad, (row_map, order)) in enumerate(zip(grads, ends.values(), strict=True)):
        if grad is None:
            continue
        ordered = grad.permute(order) if order else grad
        if touches_others(row_map, ordered, ordered.dim(), weights, batch_size):
            return False
        company.compare(index, row_map, row_map.split(ordered, ordered.dim(), batch_size), weights)
    return True
