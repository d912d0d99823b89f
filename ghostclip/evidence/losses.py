"""Evidence on losses: that each sample's loss follows that sample's outputs alone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.backward_entry import is_output
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import Edge, shape_at
from ghostclip.capture.row_maps import RowMap, candidates
from ghostclip.capture.sample_axis import LOST, only_sample, sample_axis_at
from ghostclip.errors import LossReductionError, SampleMixingError, UncoveredParameterError
from ghostclip.evidence.custom_backwards import is_linear, loss_has_custom_backwards
from ghostclip.evidence.linear_paths import PICKED
from ghostclip.evidence.loss_graph import MAX_NODES, Unheard, above_outputs, proved_outputs, separates_samples
from ghostclip.evidence.probe import GradientSource, Start, Weights, sample_sets, source_at, weightings
from ghostclip.evidence.prover import Evidence
from ghostclip.evidence.slopes import separates_at_any_slope
from ghostclip.evidence.unchecked import LOSSES

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
        """Prove that each of some values belongs to one sample, and tell to which."""
        # Any assignment of the values to samples will do, if no sample's values touch another sample's rows; so will
        # one of values nearer to the scalar. Returns how each value's rows map to samples, or those of which value
        # before it (None for its own). A value without rows of samples is refused: the loss is no sum over them.
        maps_of = [_maps_of(end, self._forward) for end in ends]
        first = [start for end, maps in zip(ends, maps_of, strict=True) for start in _starts(end, maps[:1])]
        if self._evidence.probes and self._forward.proves:
            self._evidence.unchecked.ran(LOSSES)
        if all(maps_of) and self._separates_samples(first):
            return [(maps[0], None) for maps in maps_of]
        return [self._of_one(end) for end in ends]

    def _separates_samples(self, begun: list[Start]) -> bool:
        """Return whether no sample's values touch another's rows; taken for granted where no proofs are asked for."""
        gathering = self._capture.gathering
        if not self._evidence.probes or not (gathering is None or gathering.may_ask()):
            return True
        return _separates_samples(self._capture, begun, None, self._forward.batch_size)

    def _of_one(self, end: Ends) -> tuple[RowMap, int | None]:
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
            raise LossReductionError(_NO_SUM.format(in_words(end.name), self._advice))
        rows, size = (shape_at(end.edges[0]) or (0,))[0], self._forward.batch_size
        views = _VIEWS.format(size, rows) if 0 < rows < size and size % rows == 0 else ""
        raise SampleMixingError(f"{MIXED.format(self._where(end))}{views} {self._advice}")

    def _where(self, ends: Ends) -> str:
        """Name the operation that brings samples together, as far as the graph tells."""
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
    sources = [source_at(*edge) for edge in ends.edges]
    return [Start(source, row_map) for row_map in maps for source in sources if source is not None]


def _maps_of(ends: Ends, forward: ForwardContext) -> list[RowMap]:
    """List the ways in which values may belong to the samples, the likeliest first."""
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
