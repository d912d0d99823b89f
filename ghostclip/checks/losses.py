"""Evidence on losses: that each sample's loss follows that sample's outputs alone.

A slope that is zero in one batch, what a loss multiplies by zero or cuts off, may be another one in the next: ``logits
- k * logits.mean(0)`` keeps samples apart while k is zero, as does a hinge between two samples that is not active; the
graph is the same before and after. To see what lies behind, gradients are followed from a loss to the model's outputs
twice: as they are, and with every operation that works entry by entry taken to have slope one, and every one that picks
entries to have picked any.

Losses that are known: how they were computed from outputs and targets, so that they can be with other samples. A weight
that was normalised over the batch, a rank, a threshold at the batch's median: no gradient leads through them from one
sample to the other, and the loss's graph shows a number for each sample and not where it comes from. Where the function
is known, it is called again on the outputs and targets with some samples replaced by copies of others, and on some by
themselves: neither the losses nor the gradients that the other samples' outputs receive may change.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.backward_entry import is_output
from ghostclip.capture.context import INTO_OBJECTS, CaptureContext
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import Edge, edge_of, shape_at
from ghostclip.capture.row_maps import RowMap, candidates
from ghostclip.capture.sample_axis import LOST, only_sample, sample_axis_at
from ghostclip.checks.batches import Batch
from ghostclip.checks.custom_backwards import is_linear, loss_has_custom_backwards
from ghostclip.checks.dependence import Alike, batch_axis_of
from ghostclip.checks.independence import among_larger_ones, dependence, memory, plainly, scalars_that_follow
from ghostclip.checks.linear_paths import PICKED
from ghostclip.checks.loss_graph import MAX_NODES, Unheard, above_outputs, proved_outputs, separates_samples
from ghostclip.checks.module_state import ModuleState
from ghostclip.checks.probe import (
    GradientSource,
    Start,
    Weights,
    cotangent,
    sample_sets,
    source_at,
    touches_others,
    weightings,
)
from ghostclip.checks.prover import Evidence
from ghostclip.checks.unchecked import CRITERION, LOSSES, REPLACED, SCALARS, Unchecked
from ghostclip.errors import LossReductionError, SampleMixingError, UncoveredParameterError

_REFUSED: Final = (
    "criterion {name}: the loss of one sample, or the gradient of its output, changed when {what}, although no "
    "gradient leads from one to the other: it weighs, centres, ranks or selects samples by what is in the batch, "
    "counts over it, or mixes targets. Without one sample all others' gradients would change, and no clipping bounds "
    "that. Compute each sample's loss from its own output and target, with weights that are public constants."
)
_REMEMBERED: Final = (
    "criterion {name}: losses, or gradients of outputs, changed when the call before was given other samples. It keeps "
    "something of a batch for later ones (a threshold, a centre, a running mean of the losses), which carries private "
    "samples into later steps without noise. Use public constants, or a schedule that counts calls."
)
_NOT_OF_HALVES: Final = (
    "the loss of a batch has another gradient than the losses of its two halves have together, as their mean or their "
    "sum: it weighs, centres, ranks, mixes or selects samples by what is in the batch. Without one sample all others' "
    "gradients would change, and no clipping bounds that. Compute each sample's loss from its own output and target, "
    "with weights that are public constants."
)
# Of larger arguments (logits of a language model) so many samples are looked at.
_LARGE: Final = 1 << 22
_FEW: Final = 8
_NO_OUTPUTS: Final = "no argument of the criterion is known to hold outputs"
_AS_LONG: Final = "an argument of the criterion has as many rows as there are samples, and may be none of theirs"


Copied = Callable[[], AbstractContextManager[Mapping[str, Tensor]]] | None


@_tree.leaf
@dataclass(frozen=True, eq=False)
class _Whole:
    """An argument that stays as it is when the others are exchanged for other samples."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class KnownLoss:
    """One call of a function that returned a loss for each sample, or one for all."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    criterion: Any  # the user's own, which the function calls
    node: Any  # of the graph, which made what was returned
    is_scalar: bool  # whether it was one for all
    device: str  # the type of its device
    cast: torch.dtype | None  # of autocast, where it was on
    drawn_with: Callable[[Tensor], int]  # how many records a batch has that a tensor is known to be of

    def alike(self, batch_size: int, axis: int) -> list[Alike]:
        """Return how many samples are alike in each argument."""
        return Batch(self._arguments, batch_size, axis).alike

    @property
    def _arguments(self) -> Any:
        """All arguments: a container, as are the objects among them that hold tensors (outputs of a class)."""
        return _tree.opened((self.args, self.kwargs), into_objects=INTO_OBJECTS)

    def refusal(
        self, batch_size: int, axis: int, *, mean: bool, unchecked: Unchecked, copied: Copied, rare: int
    ) -> str | None:
        """Run the loss on other batches; return why it is refused, "" if samples are independent, None if undecided."""
        # `mean`: whether one loss for all is a mean over the samples, else their sum. `copied` lets leaves stand for
        # the model's parameters; None where the model must not run. Returns None where an argument may as well be as
        # long as the batch by chance: another batch tells.
        arguments = _tree.mapped(_cut_off, self._arguments)
        batch = Batch(
            arguments, batch_size, axis, seed=unchecked.forwards, autocast=self.cast, shared=copied is None, rare=rare
        )
        if sum(tensor.numel() for tensor in _tree.tensors(batch.inputs)) > _LARGE:
            batch = batch.few(_FEW)
        arguments, batch_size = batch.inputs, batch.size
        ends = [tensor for tensor in _tree.tensors(arguments) if tensor.requires_grad]
        if self.is_scalar and not ends:
            return self._refusal_by_halves(batch, unchecked, copied)
        # What is learned beside the outputs, a temperature, has no samples.
        axes = [batch_axis_of(tensor, batch_size=batch_size, axis=axis) for tensor in ends]
        holder = _CriterionModule(self.criterion, ends)
        state, local_unchecked = ModuleState(holder), Unchecked()

        def run_without_reset(inputs: Any) -> list[Tensor]:
            return self._computed(inputs, axes, batch_size if mean else 0)

        def run(inputs: Any) -> list[Tensor]:
            state.restore()
            return run_without_reset(inputs)

        changed = dependence(holder, run, batch, local_unchecked)
        if not changed and True in (among_larger_ones(holder, plainly(run), batch)[0] or ()):
            changed = "others were replaced by several times larger ones"
        state.restore()
        if changed:
            whole = self._as_long(batch, run)
            # What is as long as batches of several sizes is theirs.
            unchecked.as_long |= {batch_size for _ in whole}
            exchanged = replace(batch, inputs=_with_whole(arguments, whole))
            if len(unchecked.as_long) != 1 or dependence(holder, run, exchanged, Unchecked()):
                return _REFUSED.format(name=self._name(), what=changed)
            unchecked.missed(_AS_LONG, CRITERION)
            return None
        remembers, _ = memory(holder, state, run_without_reset, batch)
        if remembers and True in remembers:
            return _REMEMBERED.format(name=self._name())
        unchecked.report(CRITERION, local_unchecked.reason(REPLACED))
        return ""

    def _refusal_by_halves(self, batch: Batch, unchecked: Unchecked, copied: Copied) -> str:
        """Return why a scalar loss that runs the model itself is refused: it is not that of its halves."""
        if copied is None or not isinstance(self.criterion, nn.Module):
            unchecked.missed("ranks hold the model in parts" if copied is None else _NO_OUTPUTS, CRITERION)
            return ""
        holder, local_unchecked = _CriterionModule(self.criterion, []), Unchecked()
        state = ModuleState(holder)

        def run(inputs: Any) -> list[Tensor]:
            state.restore()
            args, kwargs = _tree.closed(inputs)
            return [self.function(*args, **kwargs)]

        with torch.autocast(self.device, dtype=self.cast, enabled=self.cast is not None), copied() as leaves:
            follow = 0 in scalars_that_follow(holder, run, batch, local_unchecked, parameters=list(leaves.values()))
            state.restore()
        unchecked.report(CRITERION, local_unchecked.reason(SCALARS))
        return _NOT_OF_HALVES if follow else ""

    def _computed(self, inputs: Any, axes: Sequence[int | None], whole: int) -> list[Tensor]:
        """Return the gradients of the function's arguments and, where it has one for each sample, the losses."""
        # `axes`: the samples' axis of what has a gradient, None where there is none. `whole`: the number of samples
        # that one loss for all was a mean over; 0 where it was a sum.
        inputs = _tree.mapped(lambda leaf: leaf.tensor if isinstance(leaf, _Whole) else leaf, inputs)
        args, kwargs = _tree.closed(inputs)
        with torch.enable_grad():
            losses = self.function(*args, **kwargs)
            ends = [tensor for tensor in _tree.tensors(inputs) if tensor.requires_grad]
            grads = torch.autograd.grad(losses.sum(), ends, allow_unused=True, materialize_grads=True) if ends else ()
        if losses.dim():
            return [losses, *grads]
        sizes = [end.shape[axis] for end, axis in zip(ends, axes, strict=True) if axis is not None]
        # A mean of fewer samples is one over fewer.
        share = sizes[0] / whole if whole and sizes else 1.0
        return [grad * share for grad in grads]

    def _as_long(self, batch: Batch, run: Callable[[Any], Any]) -> list[Tensor]:
        """Return arguments that merely have as many rows as samples: the loss runs with them beside fewer samples."""
        whole, given = [], _tree.tensors(self._arguments)
        for own, leaf in zip(given, _tree.tensors(batch.inputs), strict=True):
            axis = batch_axis_of(leaf, batch_size=batch.size, axis=batch.axis)
            if axis is None or leaf.requires_grad or self.drawn_with(own):
                continue
            try:
                run(replace(batch, inputs=_with_whole(batch.inputs, [leaf])).of_samples(batch.subset))
            except Exception:  # noqa: BLE001 - it belongs to the samples
                continue
            whole.append(leaf)
        return whole

    def _name(self) -> str:
        return getattr(self.criterion, "__name__", type(self.criterion).__name__)


class _CriterionModule(nn.Module):
    """Module that holds a criterion, so that its state is restored as a model's is."""

    def __init__(self, criterion: Any, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        for number, output in enumerate(outputs):
            # Where, and how precisely, it computes.
            self.register_buffer(f"place_{number}", output.new_empty(0))


def _cut_off(leaf: Any) -> Any:
    """Return a tensor outside the graph, which is asked for a gradient if it was in it."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _with_whole(arguments: Any, whole: Sequence[Tensor]) -> Any:
    """Return the arguments with some tensors marked to stay as they are when the others are exchanged."""
    ids = set(map(id, whole))
    return _tree.mapped(lambda leaf: _Whole(leaf) if id(leaf) in ids else leaf, arguments)


# More nodes than this between a loss and the outputs are not followed.
_MAX_NODES: Final = 512
# Operations that work entry by entry on operands that are spread over each other.
_ENTRYWISE: Final = frozenset(
    {
        "Abs", "Add", "Addcdiv", "Addcmul", "Atan2", "Celu", "Clamp", "ClampMax", "ClampMin", "Clone", "Cos", "Div",
        "Elu", "Erf", "Erfc", "Exp", "Exp2", "Expm1", "Fmax", "Fmin", "Gelu", "Hardshrink", "Hardsigmoid",
        "Hardswish", "Hardtanh", "HuberLoss", "LeakyRelu", "Lerp", "Log", "Log10", "Log1p", "Log2", "LogSigmoid",
        "Logaddexp", "Logaddexp2", "MaskedFill", "Maximum", "Minimum", "Mish", "MseLoss", "Mul", "NanToNum", "Neg",
        "Pow", "Reciprocal", "Relu", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "SmoothL1Loss", "Softplus",
        "Softshrink", "Sqrt", "Sub", "Tanh", "Threshold", "ToCopy", "Where", "Xlogy",
    }
)  # fmt: skip
# Operations along an axis whose gradient goes to the picked entries alone.
_PICKING: Final = frozenset(
    {"Topk", "Sort", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min", "Cummax", "Cummin"}
)


def _is_steep(node: Any) -> bool:
    """Return whether a node's operation works entry by entry, or picks entries along an axis."""
    return _kind(node) in _ENTRYWISE or _picks(node)


def _picks(node: Any) -> bool:
    """Return whether a node picks entries along one axis (topk, max, sort)."""
    return _kind(node) in _PICKING and isinstance(_torch.saved_or(node, "dim", None), int)


def _kind(node: Any) -> str:
    """Return a node's operation name."""
    return re.sub(r"Backward\d*$", "", node.name())


def separates_at_any_slope(begun: Sequence[Start], sets: Sequence[set[int]], *, batch_size: int, axis: int) -> bool:
    """Return whether samples stay apart if the slope of each elementwise operation on the way is 1, too."""
    # True also where that cannot be told, and where they do not even with slopes as they are.
    if not any(_is_steep(node) for node, _ in above_outputs(edge_of(start.edge.source) for start in begun)):
        return True
    with torch.no_grad():
        return _is_separated(begun, sets, batch_size=batch_size, axis=axis)


def _is_separated(begun: Sequence[Start], sets: Sequence[set[int]], *, batch_size: int, axis: int) -> bool:
    """Return whether, at true slopes and at slopes of 1, some map leaves zeros in other samples' rows."""
    maps = dict[Edge, list[RowMap]]()
    for steep in (False, True):
        for samples in sets:
            followed = _followed(begun, samples, batch_size=batch_size, steep=steep)
            for edge, grad in (followed or {}).items():
                rows = _with_whole_rows(grad, axis)
                known = maps.get(edge, _row_maps_of(rows, batch_size, axis=axis))
                left = _untouched(known, rows, samples, batch_size=batch_size)
                if steep and known and not left:
                    return False
                maps[edge] = known if steep else left
    return True


def _with_whole_rows(grad: Any, axis: int) -> Any:
    """Return a gradient of which every rank has all samples: parts are of classes, whatever torch has made of them."""
    if not _torch.is_sharded_tensor(grad):
        return grad
    from torch.distributed.tensor import Replicate

    whole = Replicate()
    return grad.redistribute(
        placements=[one if one.is_shard() and one.dim % grad.dim() != axis else whole for one in grad.placements]
    )


def _row_maps_of(grad: Any, batch_size: int, *, axis: int) -> list[RowMap]:
    """Return the row maps that sizes allow; along an axis of which ranks have parts there are classes, no samples."""
    placed = grad.placements if _torch.is_sharded_tensor(grad) else ()
    divided = {one.dim % grad.dim() for one in placed if one.is_shard()}
    return [one for one in candidates(tuple(grad.shape), batch_size, axis=axis) if one.axis not in divided]


def _untouched(maps: Sequence[RowMap], grad: Any, samples: set[int], *, batch_size: int) -> list[RowMap]:
    """Return the row maps by which a gradient of some samples' values is zero in rows of others, on every rank."""
    # Each rank looks at its part alone: what would be gathered of a mesh is as large as all logits.
    part = _torch.part_of(grad)
    touched = [touches_others(one, part, part.dim(), samples, batch_size) for one in maps]
    if _torch.is_sharded_tensor(grad):
        touched = _on_any_rank(touched, grad.device_mesh, part.device)
    return [one for one, touches in zip(maps, touched, strict=True) if not touches]


def _on_any_rank(holds: Sequence[bool], mesh: Any, device: torch.device) -> list[bool]:
    """Return what holds on a rank of a mesh; called on all of them."""
    from torch.distributed.tensor import DTensor, Partial

    here = torch.tensor(holds, dtype=torch.int32, device=device)
    anywhere = DTensor.from_local(here, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return [bool(flag) for flag in anywhere.tolist()]


def _followed(begun: Sequence[Start], samples: set[int], *, batch_size: int, steep: bool) -> dict[Edge, Tensor] | None:
    """Carry gradients of some samples' values to the model's outputs; None where the graph is too large."""
    arrived, ends, numbers = defaultdict[Any, dict[int, Tensor]](dict), dict[Edge, Tensor](), count()
    pending = list[tuple[int, int, Any]]()

    def arrive(edge: Edge, grad: Tensor) -> None:
        node, output_nr = edge
        if node is None or node.name().endswith("AccumulateGrad"):
            return
        # As autograd's engine does between nodes.
        about = _torch.outputs_of(node)[output_nr]
        grad = grad.sum_to_size(about.shape).to(about.dtype)
        if is_output(edge):
            ends[edge] = ends[edge] + grad if edge in ends else grad
            return
        if node not in arrived:
            heapq.heappush(pending, (-_torch.order_of(node), next(numbers), node))
        before = arrived[node].get(output_nr)
        arrived[node][output_nr] = grad if before is None else before + grad

    for seed, start in enumerate(begun):
        arrive(
            edge_of(start.edge.source),
            cotangent(start, batch_size=batch_size, weights=dict.fromkeys(samples, 1.0), seed=seed),
        )
    for _ in range(_MAX_NODES):
        if not pending:
            return ends
        node = heapq.heappop(pending)[-1]
        for edge, grad in zip(node.next_functions, _behind(node, arrived.pop(node), steep=steep), strict=False):
            if grad is not None:
                arrive(edge, grad)
    return None


def _behind(node: Any, grads: dict[int, Tensor], *, steep: bool) -> Sequence[Tensor | None]:
    """Return the gradients of a node's inputs, with ``steep`` as if its slope were 1."""
    if steep and _is_steep(node) and 0 in grads and not _is_for_nothing(node):
        known = _of_any_pick(node, grads[0]) if _picks(node) else _at_slope_one(node, grads[0])
        if known is not None:
            return known
    input_grads = _torch.run_node(node, grads)
    return input_grads if isinstance(input_grads, tuple) else (input_grads,)


def _of_any_pick(node: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the input gradient of a picking operation as if every entry along the axis had been picked."""
    sizes = shape_at(node.next_functions[0]) or ()
    if not sizes:
        return [grad]
    axis = _torch.signed(_torch.saved(node, "dim")) % len(sizes)
    total = grad.abs() if grad.dim() < len(sizes) else grad.abs().sum(axis)
    return [total.unsqueeze(axis).expand(sizes)]


def _is_for_nothing(node: Any) -> bool:
    """Return whether a value is multiplied by 0 (not 0.0), which stands in code for a zero of its kind."""
    other = _torch.saved_or(node, "other", None)
    is_whole = isinstance(other, Tensor) and other.dim() == 0 and other.dtype is torch.int64
    return is_whole and "Mul" in node.name() and int(other) == 0


def _at_slope_one(node: Any, grad: Tensor) -> list[Tensor | None] | None:
    """Return the gradients of a node's inputs as if its slopes were one; None where shapes do not tell them."""
    input_grads = list[Tensor | None]()
    for edge in node.next_functions:
        sizes = None if edge[0] is None or edge[0].name().endswith("AccumulateGrad") else shape_at(edge)
        if sizes is None:
            input_grads.append(None)
            continue
        # A loss of each pair, say, with its own reduction.
        if (grad.dim() == 0 and sizes) or torch.broadcast_shapes(sizes, grad.shape) != grad.shape:
            return None
        input_grads.append(grad.abs().sum_to_size(sizes))
    return input_grads


# How far below a value that mixes samples the operation that does so is looked for.
_MAX_DESCENT: Final = 24
MIXED: Final = (
    "the loss of one sample depends on other samples' outputs (a contrastive loss, or one normalised over the batch), "
    "so removing a sample changes every other's gradient and no bound holds.{} Write the loss of each sample from its "
    "own outputs."
)

_NO_SUM: Final = (
    "the loss is no sum over samples: several samples enter '{}' together, so removing one changes every other's "
    "gradient and no bound holds. {}"
)
_COMPILED: Final = "torch.compile hides whether the loss is a sum over samples: compute it outside of what is compiled."
_VIEWS: Final = (
    " The model was called on {} rows, and values of {} rows were made of its outputs: if it was given several rows of "
    "each record together (views, or an anchor, a positive and a negative, put into one batch by torch.cat), call it "
    "once for each of them, za, zp, zn = model(a), model(p), model(n)."
)
_OUTSIDE: Final = (
    "the loss multiplies what was averaged over the samples by a trainable parameter of shape {} (a learned variance, "
    "a weight of tasks, a temperature), outside of the model's forward: its gradient could not be clipped per sample. "
    "Hold it in the private model, and let the forward return each sample's own loss, before any mean, as "
    "(-log_var).exp() * each + log_var with each of shape (B,); then losses.mean().backward()."
)


@dataclass(frozen=True)
class Ends:
    """Values that a loss is linear in, of one shape, whose rows belong together."""

    edges: tuple[Edge, ...]  # their places in the graph
    name: str  # the operation that made them or consumed them
    classes: tuple[int, ...] = ()  # axes that cannot be samples
    passed: Sequence[Edge] = ()  # the values between the scalar and these


def probe_losses(evidence: Evidence, capture: CaptureContext, losses: Tensor) -> None:
    """Prove that one sample's loss touches that sample's rows only."""
    size = capture.forward.batch_size
    begun = [Start(GradientSource.of(losses), RowMap("axis", 0))]
    # A backward function that follows the batch (g / g.norm()) shows in company alone; torch's own follow no batch.
    company = [dict.fromkeys(range(size), 1.0)] if loss_has_custom_backwards([losses], capture.forward) else []
    if not _separates_samples(capture, begun, [{size // 2: 1.0}, *company], size):
        raise SampleMixingError(MIXED.format(""))
    if capture.forward.proves:
        evidence.unchecked.ran(LOSSES)


def prove_rows(evidence: Evidence, losses_B: Tensor, rows: Tensor) -> None:
    """Prove that one sample's loss touches that sample's rows of a tensor only, whatever lies between the two.

    Cost:
        About log2(B) backwards from the losses to the tensor.
    """
    # `rows`: a leaf that the losses were computed from, shape ``(B, ...)``.
    if not evidence.probes or len(losses_B) < 2:
        return
    for samples in sample_sets(len(losses_B)):
        others_B = torch.ones(len(losses_B), dtype=torch.bool, device=rows.device)
        others_B[list(samples)] = False
        weights_B = (~others_B).to(losses_B)
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            [losses_B], [rows], [weights_B], retain_graph=True, allow_unused=True
        )
        if any(grad is not None and bool(grad[others_B].nan_to_num(nan=0.0).any()) for grad in grads):
            raise SampleMixingError(MIXED.format(""))
    evidence.unchecked.ran(LOSSES)


class LossRows:
    """Proves of the values that a loss is linear in that each belongs to one sample."""

    def __init__(self, evidence: Evidence, capture: CaptureContext, forward: ForwardContext, *, advice: str) -> None:
        # `advice`: what to do about a loss that is refused.
        self._evidence, self._capture, self._forward, self._advice = evidence, capture, forward, advice

    def of(self, ends: Sequence[Ends]) -> list[tuple[RowMap, int | None]]:
        """Prove that each of some values belongs to one sample; return (row map, index of an earlier value or None)."""
        # Any assignment of the values, which the scalar is linear in, to samples will do, if no sample's values touch
        # another sample's rows; so will one of values nearer to the scalar. Returns how each value's rows map to
        # samples, or those of which value before it (None for its own). A value without rows of samples is refused: the
        # loss is no sum over them.
        maps_of = [_maps_of(end, self._forward) for end in ends]
        first = [start for end, maps in zip(ends, maps_of, strict=True) for start in _starts(end, maps[:1])]
        if self._evidence.probes and self._forward.proves:
            self._evidence.unchecked.ran(LOSSES)
        if all(maps_of) and self._separates_samples(first):
            return [(maps[0], None) for maps in maps_of]
        return [self._of_one(end) for end in ends]

    def _separates_samples(self, begun: list[Start]) -> bool:
        """Return whether no sample's values depend on another's rows; True where nothing is to be proved."""
        gathering = self._capture.gathering
        if not self._evidence.probes or not (gathering is None or gathering.may_prove()):
            return True
        return _separates_samples(self._capture, begun, None, self._forward.batch_size)

    def _of_one(self, end: Ends) -> tuple[RowMap, int | None]:
        """Return the row map of a value, or of one nearer to the scalar, that keeps samples apart; else refuse."""
        tried = False
        before = [(Ends((edge,), end.name), number) for number, edge in enumerate(end.passed) if shape_at(edge)]
        for values, number in [(end, None), *reversed(before)]:
            for row_map in _maps_of(values, self._forward):
                tried = True
                if self._separates_samples(_starts(values, [row_map])):
                    return row_map, number
        for node, _ in above_outputs(end.edges):
            leaf = _torch.leaf_of(node)
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
                raise UncoveredParameterError(_OUTSIDE.format(tuple(leaf.shape)))
        if not tried:
            compiled = end.name == "CompiledFunctionBackward"
            raise LossReductionError(_COMPILED if compiled else _NO_SUM.format(in_words(end.name), self._advice))
        rows, size = (shape_at(end.edges[0]) or (0,))[0], self._forward.batch_size
        views = _VIEWS.format(size, rows) if 0 < rows < size and size % rows == 0 else ""
        raise SampleMixingError(f"{MIXED.format(self._where(end))}{views} {self._advice}")

    def _where(self, ends: Ends) -> str:
        """Return the sentence that names the operation that brings samples together."""
        current, name = ends, ends.name
        for _ in range(_MAX_DESCENT):
            below = [
                Ends((edge,), edge[0].name())
                for node, _ in current.edges
                for edge in node.next_functions
                if edge[0] is not None and source_at(*edge) is not None
            ]
            name = current.edges[0][0].name()
            mixed = [end for end in below if not self._any_fits(end)]
            if not mixed or is_output(mixed[0].edges[0]):
                break
            current = mixed[0]
        return f" They meet in '{in_words(name)}'."

    def _any_fits(self, end: Ends) -> bool:
        """Return whether some row map of a value keeps samples apart."""
        size = self._forward.batch_size
        maps = _maps_of(end, self._forward)
        return any(_separates_samples(self._capture, _starts(end, [row_map]), None, size) for row_map in maps)


def _separates_samples(
    capture: CaptureContext, begun: list[Start], weights: Sequence[Weights] | None, batch_size: int
) -> bool:
    """Return whether gradients from samples leave zeros in all other samples' rows, and move none."""
    # `weights`: what samples are multiplied by in each backward; None for what tells any two apart.
    forward = capture.forward
    linear = weights is None and is_linear([start.edge.source for start in begun], capture, forward)
    asked = weightings(batch_size, linear=linear) if weights is None else weights
    with capture.listening(Unheard()):
        separated = separates_samples(begun, proved_outputs(begun), asked, batch_size=batch_size, linear=linear)
    sets = sample_sets(batch_size) if weights is None else [set(one) for one in weights]
    return separated and separates_at_any_slope(begun, sets, batch_size=batch_size, axis=forward.batch_axis)


def _starts(ends: Ends, maps: Sequence[RowMap]) -> list[Start]:
    """Return where backwards from some values begin, one for each row map."""
    sources = [source_at(*edge) for edge in ends.edges]
    return [Start(source, row_map) for row_map in maps for source in sources if source is not None]


def _maps_of(ends: Ends, forward: ForwardContext) -> list[RowMap]:
    """Return how rows of values may map to samples, the likeliest first."""
    (node, number), size = ends.edges[0], forward.batch_size
    shape = shape_at((node, number)) or ()
    maps = candidates(shape, size, axis=forward.batch_axis)
    gathered = gathered_at((node, number), forward)
    if gathered is not None:
        maps = [gathered, *maps]
    only = only_sample(node, number, size, is_output)
    if only is not None:
        # What may as well be one of as many positions as there are samples.
        maps = [RowMap("one", 0, torch.tensor([only])), *maps]
    # A loss over classes is one term; its classes are no samples.
    return [row_map for row_map in maps if row_map.axis not in ends.classes]


def is_picked(edge: Edge) -> bool:
    """Return whether a value was picked from a model's output by an index or a mask."""
    # True also where that cannot be told.
    names = [node.name() for node, _ in above_outputs([edge])]
    return len(names) >= MAX_NODES or not PICKED.isdisjoint(names)


def gathered_at(edge: Edge, forward: ForwardContext) -> RowMap | None:
    """Return the map of rows that were folded or picked; None where they lie as they come."""
    shape = shape_at(edge)
    rows = sample_axis_at(edge) if shape and shape[0] != forward.batch_size else None
    return None if rows is None or rows is LOST or rows.axis else RowMap.of(rows, forward.batch_size)


def in_words(name: str) -> str:
    """Return the name of a node, ``TopkBackward0``, as its operation is called: ``topk``."""
    plain = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
