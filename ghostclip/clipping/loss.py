"""Losses, as a clipper's backward takes them: checks of their shape, classes on several ranks, positions in chunks.

Of logits whose classes lie on several ranks (``loss_parallel``) every rank has whole losses of the samples, DTensors,
and its classes' part of the logits' gradient. torch computes that part within the context alone, and for cross-entropy
alone; whatever else it would leave out is refused here.

A scalar loss is proved, not believed: that it is a sum over samples, and that its scale is the declared one.

What autograd shows of a loss is cut into the values that it is linear in and the factors before them (see
`ghostclip.checks.linear_paths`). Of the values it is proved, by backwards from some samples' rows alone, that each
belongs to one sample; that costs backwards, and is done for every new form of loss and in the forwards that are proved
anyway. Of the factors it is checked in every step that none depends on other samples.

Privacy:
    After this, the gradient of each sample that arrives at the layers is a function of that sample, of the weights and
    of public constants. Not seen is what enters a loss without a gradient: weights that were computed from the batch
    and detached.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.backward_entry import is_output
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import Edge, edge_of, shape_at
from ghostclip.capture.row_maps import FOLDED, WHOLE, RowMap
from ghostclip.capture.sample_axis import sample_axis_at
from ghostclip.checks.linear_paths import CLASSES, Number, Path, ReducedAxes, grouped, paths
from ghostclip.checks.loss_graph import above_outputs, refuse_changed_gradients, refuse_following
from ghostclip.checks.losses import Ends, LossRows, gathered_at, is_picked
from ghostclip.checks.prover import Evidence
from ghostclip.clipping.loss_scale import (
    ANY,
    SCHEDULES,
    SUM,
    TOLERANCE,
    Counts,
    Scale,
    added,
    check_shares,
    common_factors,
    constant_of,
    counted_positions,
    differ,
    loss_paths,
    picks_samples,
    remedy,
    row_of,
    scale_of,
)
from ghostclip.errors import InvalidOptionError, LossReductionError

LossesOf = Callable[[Tensor, slice], Tensor]
"""Called with the values at some positions and the slice that they are of; returns losses of the samples, ``(B,)``."""
# They show the same values in another shape.
_VIEWS: Final = re.compile("(View|UnsafeView|ReshapeAlias|Alias|Transpose|Permute|T)Backward0")
_SOFTMAX: Final = "LogSoftmaxBackward0"
_OUTSIDE: Final = (
    "the cross-entropy of logits whose classes lie on several ranks has its gradient within loss_parallel() alone: "
    "call backward() inside the context that the loss was computed in."
)
_NOT_FUSED: Final = (
    "'{}' takes a log_softmax that loss_parallel() computed, to which torch gives no gradient of its own. Use "
    "F.cross_entropy(logits, labels, reduction='none') there, or whole logits: logits.full_tensor()."
)


def back_propagate(loss: Tensor) -> None:
    """Back-propagate the sum of losses ``(B,)``, or a scalar."""
    # A gradient of ones instead of a sum is two operations fewer, and their nodes; and what `loss.backward` checks on
    # the way to autograd takes half as long as a small backward does.
    ones = torch.ones_like(loss)
    if type(loss) is not Tensor or not loss.requires_grad:
        loss.backward(ones)
    else:
        _torch.run_backward((loss,), (ones,))


def check_shape(loss: Tensor, *, batch_size: int) -> None:
    """Refuse a loss that is neither one value per sample nor a scalar; an empty batch has losses of any length."""
    if loss.dim() > 1:
        raise LossReductionError(
            f"the loss has shape {tuple(loss.shape)}; expected per-sample losses of shape (B,) or a scalar. "
            "Remove extra axes with loss.flatten() or loss.squeeze(1) where there is one value per sample."
        )
    if loss.dim() == 1 and batch_size and loss.shape[0] != batch_size:
        raise LossReductionError(
            f"{loss.shape[0]} losses were given for a batch of {batch_size} samples. Reduce the loss over everything "
            "but the samples (reduction='none', then a mean over each sample's own positions)."
        )


def in_chunks(
    hidden: Tensor, losses_of: LossesOf, *, positions: int, axis: int, back: Callable[[Tensor, Tensor], None]
) -> tuple[Tensor, Tensor | None]:
    """Run the loss and its backward for one slice of positions after another."""
    # Returns the samples' losses (B,), without graph, and the gradient of `hidden`, None where no loss depends on it.
    # `back` runs the backward of a slice's losses; its second argument is the leaf that the slices are cut from.
    if hidden.dim() <= axis or axis < 1 or not hidden.requires_grad:
        raise InvalidOptionError(
            f"hidden of shape {tuple(hidden.shape)} with axis={axis}: expected what the model returned in its "
            "graph, samples along axis 0, and an axis of positions after it."
        )
    leaf = hidden.detach().requires_grad_()
    total_B = hidden.new_zeros(hidden.shape[0])
    for start in range(0, hidden.shape[axis], positions):
        at = slice(start, min(start + positions, hidden.shape[axis]))
        losses_B = losses_of(leaf.narrow(axis, at.start, at.stop - at.start), at)
        if losses_B.dim() != 1:
            raise LossReductionError(
                f"losses_of returned shape {tuple(losses_B.shape)}; expected the losses of the samples, (B,)."
            )
        back(losses_B, leaf)
        total_B += losses_B.detach()
    return total_B, leaf.grad


def plain_losses(loss: Tensor) -> Tensor:
    """Return losses of the samples as a plain tensor, in the graph."""
    # Refuse a DTensor in parts, or one that is reduced.
    if _torch.is_sharded_tensor(loss):
        placed: Any = loss
        if loss.dim() == 0 or not all(one.is_replicate() for one in placed.placements):
            _refuse_on_mesh(loss)
    return _torch.part_of(loss)


def _refuse_on_mesh(root: Any) -> None:
    """Refuse a backward that starts at a DTensor: whose rows are summed there is not proved."""
    if _torch.is_sharded_tensor(root):
        raise LossReductionError(
            f"the loss is a DTensor of shape {tuple(root.shape)}, placed as {', '.join(map(str, root.placements))}: "
            "whose rows it sums is not proved there. Give whole losses of the samples to clipper.backward(losses), or "
            "take them off the mesh before they are summed: F.cross_entropy(logits, labels, reduction='none')"
            ".to_local(), or ghostclip.losses.token_losses(logits, labels)."
        )


def refuse_lost_gradient(roots: Sequence[Any]) -> None:
    """Refuse a loss on a mesh, or one of divided logits whose gradient torch would leave out."""
    # The backward is outside of `loss_parallel`, or a log-softmax inside enters something else than a cross-entropy.
    for root in roots:
        _refuse_on_mesh(root)
    within = _torch.in_loss_parallel()
    fused: set[Any] = set()
    for node, inputs in above_outputs(map(edge_of, roots)):
        is_loss = node.name() in CLASSES and _torch.is_sharded_tensor(_torch.saved_or(node, "self", None))
        if is_loss and not within:
            raise LossReductionError(_OUTSIDE)
        if is_loss or (node in fused and _VIEWS.fullmatch(node.name())):
            fused.update(before for before, _ in inputs)
        elif within:
            _refuse_softmax(node, [before for before, _ in inputs])


def _refuse_softmax(node: Any, before: Iterable[Any]) -> None:
    """Refuse a node that reads the divided log-softmax of `loss_parallel` and is no cross-entropy."""
    for taken in before:
        one = taken
        while _VIEWS.fullmatch(one.name()) and one.next_functions[0][0] is not None:
            one = one.next_functions[0][0]
        if one.name() == _SOFTMAX and _torch.is_sharded_tensor(_torch.saved_or(one, "result", None)):
            raise LossReductionError(_NOT_FUSED.format(re.sub("Backward[0-9]*$", "", node.name())))


# What tells a way through a loss again in the next step.
_Key = tuple[Any, ...]
_CHANGED: Final = (
    "the losses of all samples are multiplied, or chosen, by a tensor of shape {shape} that held other values in "
    "earlier steps. A factor that follows the batch (its classes, its losses, a variance over it) makes each sample's "
    "gradient depend on the others: use public constants, or weights computed from each sample's own values (for a "
    "schedule of class weights: losses * weight[labels]). "
    f"{SCHEDULES}"
)


@dataclass
class _Seen:
    """What was proved of one path through a loss, and its scale."""

    row_map: RowMap = WHOLE  # how the rows of its values map to samples
    place: int | None = None  # index of these values on the path, from its end, as -1; None for the end itself
    scale: Scale | None = None  # the factor that it had
    by_row: bool = False  # whether a loop has added up samples' rows of these values


class LossExaminer:
    """Proves, of one model's scalar losses, that they are sums over samples of one known scale."""

    def __init__(self, reduction: str, evidence: Evidence) -> None:
        """Begin without any loss seen."""
        self._reduction, self._evidence = reduction, evidence
        self._seen: dict[_Key, _Seen] = {}  # by path
        self._constants: dict[_Key, float] = {}  # factor of a path through losses of samples
        # Of factors of several values that all samples have in common.
        self._factors: dict[_Key, Tensor] = {}

    def examine(
        self,
        capture: CaptureContext,
        roots: Sequence[Any],
        grads: Sequence[Tensor | None],
        forwards: Sequence[ForwardContext],
    ) -> None:
        """Refuse a loss that is not shown to be a sum over samples of the declared scale."""
        # Refused: a scale or form not shown to be independent of other samples, a hook between loss and outputs, a mean
        # whose gradients do not follow their scale, losses that mix samples, and trainable parameters outside the
        # model.
        forward = forwards[0]
        if forward.is_dummy:
            return
        begun = [self._begun(*one) for one in zip(roots, list(grads) or [None] * len(roots), strict=True)]
        try:
            path_groups = grouped(paths(begun, is_output), frozenset(forward.use_counts))
        except RecursionError:
            raise LossReductionError(f"the loss has too many terms to be followed. {remedy(self._reduction)}") from None
        refuse_changed_gradients(roots, forward)
        for key in [key for key, alike in path_groups.items() if all(map(_adds_nothing, alike))]:
            # Whatever its form is, and whatever it would mix.
            numbers = [number for path in path_groups.pop(key) for number in path.numbers]
            if forward.batch_size > 1 or not any(number.has_axes for number in numbers):
                self._agree(key, [Path()], [Scale(ANY, 0.0)], forward.batch_size)
        asks = self._evidence.must_prove_loss(roots[0], forward, is_scalar=True)
        asks = asks and (capture.gathering is None or capture.gathering.may_prove())
        if forward.batch_size > 1 and (asks or forward.unproven or self._is_new(path_groups, forward)):
            with self._evidence.unseen(capture, roots, forward):
                if path_groups:
                    self._prove(capture, path_groups, forward)
                if self._reduction == "mean" and (asks or forward.unproven):
                    self._evidence.refuse_mean(capture, roots, forward)
            if asks:
                # A sum that nothing divides is one, whatever was declared.
                summed = bool(forward.losses) and self._are_summed(path_groups, forward, roots, grads)
                self._evidence.check_known(capture, roots[0], forward, mean=self._reduction == "mean" and not summed)
                self._evidence.proved_loss(roots[0], forward)
        forward.losses.clear()
        self._evidence.check_loss(capture, roots, forward)
        summed = self._are_summed(path_groups, forward, roots, grads)
        self._refuse_changed_factors(path_groups, forward)
        refuse_following(roots, forward)
        for each in forwards:
            each.summed = summed
        self._evidence.refuse_padding(
            capture, roots, path_groups.values(), forward, partial(self._is_of_one, path_groups)
        )

    def examine_losses(self, capture: CaptureContext, losses_B: Tensor, forward: ForwardContext) -> None:
        """Refuse losses of samples with a common factor that differs from earlier steps or may follow other samples."""
        if losses_B.grad_fn is None or forward.is_dummy:
            return
        path_groups, size = loss_paths(losses_B, frozenset(forward.use_counts)), forward.batch_size
        for key, alike in path_groups.items():
            constant = constant_of(
                alike, batch_size=size, axis=forward.batch_axis, counts=self._counts(is_new=key not in self._constants)
            )
            before = self._constants.setdefault(key, constant)
            if differ(before, constant):
                raise LossReductionError(
                    f"every sample's loss was multiplied by {before:g} in earlier steps and is multiplied by "
                    f"{constant:g} now. A factor that follows the batch makes each sample's gradient depend on the "
                    "others: divide each sample's loss by its own count instead, those of a loop over samples by all "
                    f"counts together, torch.stack(sums) / torch.tensor(counts). {SCHEDULES}"
                )
        self._refuse_changed_factors(path_groups, forward)
        if size > 1:
            self._evidence.refuse_padding(
                capture, [losses_B], path_groups.values(), forward, partial(self._is_of_one, path_groups)
            )

    def _are_summed(self, path_groups: dict[_Key, list[Path]], forward: ForwardContext, roots: Any, grads: Any) -> bool:
        """Return whether a loss is a sum over samples, not a mean; refuse a scale that differs from earlier steps."""
        forms: set[bool] = set()
        for key, alike in path_groups.items():
            seen = self._seen.setdefault(key, _Seen())
            placed = [_ending_at_rows(path, seen) for path in alike if not _adds_nothing(path)]
            seen.by_row = seen.by_row or _are_rows(placed, seen.row_map, forward.batch_size)
            scales = [self._scale(path, seen, forward, roots, grads) for path in placed]
            forms |= {scale.forms == SUM for scale in scales if scale.forms != ANY}
            self._agree(key, placed, scales, forward.batch_size)
        if len(forms) > 1:
            raise LossReductionError(
                "one part of the loss is averaged over the samples and another is summed: norms of one would be off by "
                f"the batch size. A loss that is summed throughout: loss_reduction='sum'. {remedy(self._reduction)}"
            )
        return True in forms

    def _agree(self, key: _Key, parallel_paths: Sequence[Path], scales: Sequence[Scale], batch_size: int) -> None:
        """Refuse a path whose scale differs from earlier steps; keep the forms that fit all of them."""
        seen = self._seen.setdefault(key, _Seen())
        forms = frozenset.intersection(*(scale.forms for scale in scales))
        scale = Scale(forms, added(parallel_paths, [scale.constant for scale in scales], seen.row_map, batch_size))
        seen.scale = scale if seen.scale is None else seen.scale.agreed(scale, reduction=self._reduction)

    def _refuse_changed_factors(self, path_groups: dict[_Key, list[Path]], forward: ForwardContext) -> None:
        """Refuse factors of several values that all samples have in common, and that differ from earlier steps."""
        size, axis = forward.batch_size, forward.batch_axis
        # Of one sample alone they may be its own.
        keys = path_groups if size > 1 else ()
        with_factors = [(key, index) for key in keys for index, path in enumerate(path_groups[key]) if path.factors]
        for key, index in with_factors:
            row_map = self._seen[key].row_map if key in self._seen else None
            for number, values in common_factors(path_groups[key][index], row_map, size, axis):
                now = _moments(values)
                before = self._factors.setdefault((*key, index, number, *values.shape), now)
                if bool(((before - now.to(before.device)).abs() > TOLERANCE * before[0]).any()):
                    raise LossReductionError(_CHANGED.format(shape=tuple(values.shape)))

    def _is_new(self, path_groups: dict[_Key, list[Path]], forward: ForwardContext) -> bool:
        """Return whether a path through the loss was not proved, or may have another row map now."""
        proven = {key: seen for key, seen in self._seen.items() if seen.row_map is not WHOLE}
        return not path_groups.keys() <= proven.keys() or any(
            _is_moved(path, proven[key], forward) for key, (path, *_) in path_groups.items()
        )

    def _is_of_one(self, path_groups: dict[_Key, list[Path]], path: Path) -> bool:
        """Return whether the values at the end of a path are one sample's, as was proved, or as the graph shows."""
        keys = [key for key, alike in path_groups.items() if any(one is path for one in alike)]
        if any(key in self._seen and self._seen[key].row_map.kind == "one" for key in keys):
            return True
        rows = sample_axis_at(path.ends[0])
        return rows is not None and rows.axis < 0

    def _begun(self, root: Any, grad: Tensor | None) -> tuple[Edge, Path]:
        """Return where a backward starts: the edge, and a path with the starting gradient as its factor."""
        edge = edge_of(root)
        numbers: tuple[Number, ...] = ()
        if grad is not None and grad.numel():
            value = float(grad.flatten()[0])
            if not bool((grad == value).all()):
                raise LossReductionError(
                    "a backward was given a gradient whose entries differ: weights of the samples that cannot be told "
                    "from a normalisation over the batch. Multiply the losses by them, then clipper.backward(losses)."
                )
            numbers = () if value == 1 else (Number(abs(value), value, divides=False, plain=True),)
        sizes = shape_at(edge) or ()
        reduced = (ReducedAxes("sum", sizes, tuple(range(len(sizes)))),) if sizes else ()
        return edge, Path(numbers=numbers, reduced=reduced)

    def _prove(self, capture: CaptureContext, path_groups: dict[_Key, list[Path]], forward: ForwardContext) -> None:
        """Prove that each value that the loss is linear in belongs to one sample; store their row maps."""
        ends = [_ends(path) for path, *_ in path_groups.values()]
        maps = LossRows(self._evidence, capture, forward, advice=remedy(self._reduction)).of(ends)
        for key, end, (row_map, axis) in zip(path_groups, ends, maps, strict=True):
            seen = self._seen.setdefault(key, _Seen())
            seen.row_map, seen.place = row_map, None if axis is None else axis - len(end.passed)

    def _counts(self, *, is_new: bool) -> Counts:
        """Return the function that counts positions in the batch; for a known path one that counts nothing."""
        return self._evidence.padding.counts if is_new else tuple

    def _scale(self, path: Path, seen: _Seen, forward: ForwardContext, roots: Any, grads: Any) -> Scale:
        """Return the scale of one path, and refuse a mean whose divisor depends on other samples."""
        size, row_map, before = forward.batch_size, _now(path, seen.row_map, forward), seen.scale
        joins = seen.by_row or any(step.kind == "joined" for step in path.reduced)
        if joins and (row := row_of(path, row_map, size)) is not None:
            # Of a row that is put together with others, or added to them, what lies below is one sample's.
            row_map = RowMap("one", 0, torch.tensor([row]))
        counts = self._counts(is_new=before is None)
        counted = partial(counted_positions, path, row_map, size, roots=roots, grads=grads)
        scale = scale_of(
            path, row_map, forward, reduction=self._reduction, counts=counts, counted=counted, before=before
        )
        if size > 1 and "mean" in scale.forms and row_map.kind != "one":
            picked = picks_samples(path, size, forward.batch_axis)
            check_shares(path, row_map, batch_size=size, picked=picked, roots=roots, grads=grads)
        return scale


def _are_rows(parallel_paths: Sequence[Path], row_map: RowMap, batch_size: int) -> bool:
    """Return whether paths lead through the rows of several samples, one by one."""
    if len(parallel_paths) == 1 or row_map.kind != "axis":
        return False
    return len({row_of(path, row_map, batch_size) for path in parallel_paths} - {None}) > 1


def _moments(values: Tensor) -> Tensor:
    """Return three numbers that identify a tensor's values and their order, float64."""
    with _torch.dispatch_modes_off():
        flat = _torch.part_of(values).detach().double().flatten()
        weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
        return torch.stack([flat.abs().sum(), flat.sum(), flat @ weights])


def _ends(path: Path) -> Ends:
    """Return the values at the end of a path."""
    classes = (1,) if path.name in CLASSES and path.loss is not None else ()
    return Ends(path.ends, path.name, classes, path.passed())


def _is_moved(path: Path, seen: _Seen, forward: ForwardContext) -> bool:
    """Return whether the rows at the end of a path may have another row map than when they were proved."""
    if seen.row_map.kind == "gathered":
        return gathered_at(_ending_at_rows(path, seen).ends[0], forward) is None
    return seen.row_map.kind in FOLDED and any(map(is_picked, path.ends))


def _adds_nothing(path: Path) -> bool:
    """Return whether a path is multiplied by zero."""
    return any(number.factor == 0 for number in path.numbers)


def _ending_at_rows(path: Path, seen: _Seen) -> Path:
    """Return a path that ends where its values were proved to have rows of samples."""
    return path if seen.place is None else path.cut(seen.place)


def _now(path: Path, row_map: RowMap, forward: ForwardContext) -> RowMap:
    """Return the row map in this step: rows that an index picks may be others than before."""
    if row_map.kind != "gathered":
        return row_map
    if forward.batch_size == 1:
        # All rows are the one sample's, and nothing was followed.
        return RowMap("major")
    gathered = gathered_at(path.ends[0], forward)
    return gathered or row_map
