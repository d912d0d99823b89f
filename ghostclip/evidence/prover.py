"""`Evidence`: what a model is asked in its 1st, 4th, 16th, ... forward: whose rows are whose, and whether samples mix.

Before such a forward runs, it is run without gradients with one sample more (whose shapes tell where samples lie);
after it, gradients of some samples alone, other batches and buffers are looked at.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ghostclip import _torch, _tree
from ghostclip.capture import backward_entry
from ghostclip.capture.bags import as_flat
from ghostclip.capture.batch_axis import RowMap
from ghostclip.capture.call_sites import MAX_WAYS
from ghostclip.capture.context import CaptureContext, ModuleCall, outputs_of
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.growth import Grown, compared, shapes_of
from ghostclip.capture.nodes import Edge, edge_of
from ghostclip.capture.packed import packed_inputs
from ghostclip.capture.row_maps import refuse_other_axis
from ghostclip.errors import LossReductionError
from ghostclip.evidence.buffers import Buffers
from ghostclip.evidence.dependence import where_dependence_starts
from ghostclip.evidence.exchanges import Exchanges, refuse_split_positions
from ghostclip.evidence.growth import grown
from ghostclip.evidence.independence import Batch, refuse_dependence, refuse_memory
from ghostclip.evidence.linear_paths import Path
from ghostclip.evidence.loss_graph import Sizes, has_hooks, refuse_beyond_outputs
from ghostclip.evidence.module_state import ModuleState, restored
from ghostclip.evidence.node_hooks import refuse_node_hooks
from ghostclip.evidence.output_rows import Unheard, note
from ghostclip.evidence.own_backwards import (
    has_own_backwards,
    refuse_backwards_of_the_batch,
    refuse_means_without_scale,
    without_scale,
)
from ghostclip.evidence.padding import Padding
from ghostclip.evidence.probe import Probe, ask, starts
from ghostclip.evidence.randomness import Randomness
from ghostclip.evidence.unchecked import BACKWARDS, BEHIND, FEWER, REPLACED, ROWS, Unchecked

_WHERE_ON_ONE: Final = "Run ghostclip.validate on a smaller model of this kind on one device, which names the module."


class Evidence:
    """Asks for evidence on the forwards of one model.

    Attributes:
        probes: Whether any is asked for.
        unchecked: What could not be asked.
        loss_sizes: What was seen of losses: see `ghostclip.evidence.loss_graph`.
        padding: What is known of axes that are as long as the longest sample of a batch.
        records_of: Returns how many of a forward's samples are no copies of others; None where none are.
        hands_on: Whether outputs go to another part of the model, which takes their rows for samples as they lie.
    """

    def __init__(self, *, probes: bool, in_parts: bool = False, splits_sequences: bool = False) -> None:
        """Ask nothing yet.

        Args:
            probes: Whether to ask at all.
            in_parts: Whether ranks have parts of the model, and may exchange what they compute with them.
            splits_sequences: Whether they have positions of the same samples, which they may exchange.
        """
        self.probes = probes
        self._may_exchange, self._splits_sequences = in_parts or splits_sequences, splits_sequences
        self.unchecked = Unchecked()
        self.loss_sizes: Sizes = {}
        self.padding = Padding()
        self.records_of: Callable[[int], int] | None = None
        self.hands_on = False
        self._loss_ways: set[Any] = set()
        # Why means are refused, whatever the loss is.
        self._without_scale = ""
        self._buffers: Buffers | None = None
        self._state: ModuleState | None = None
        self._drew = True
        # Whether forwards leave something in the modules, which later ones may follow.
        self._remembers = False
        self._randomness: Randomness | None = None

    def renew(self) -> None:
        """Ask for all evidence anew, from the next forward on: the model was changed."""
        self.unchecked.renew()
        self.loss_sizes.clear()
        self.padding.renew()
        self._loss_ways.clear()

    def asks(self, capture: CaptureContext) -> bool:
        """Return whether the latest forward is one that evidence is asked for.

        Args:
            capture: Whose forward it is.

        Returns:
            False for a forward of one sample as well, which can prove nothing.
        """
        asks = self.probes and capture.forward.unproven and capture.forward.batch_size > 1
        return asks and (capture.gathering is None or capture.gathering.may_ask())

    def asks_of_loss(self, root: Any, forward: ForwardContext, *, is_scalar: bool = False) -> bool:
        """Return whether a loss is one that evidence is asked for: that of a proved forward, or computed in a new way.

        A hook on its way may do another thing in every step.

        Args:
            root: Where its backward starts.
            forward: The forward that it comes from.
            is_scalar: Whether hooks between it and the outputs can change nothing.

        Returns:
            False as well for a forward of one sample.
        """
        if forward.batch_size < 2 or not self.probes:
            return False
        way = self._loss_way(root, forward)
        is_new = way not in self._loss_ways and len(self._loss_ways) < MAX_WAYS
        return forward.unproven or is_new or has_hooks([root], forward, outputs_alone=is_scalar)

    def proved_loss(self, root: Any, forward: ForwardContext) -> None:
        """Note that a loss was proved, unless its forward proves nothing.

        Args:
            root: As for `asks_of_loss`.
            forward: As for `asks_of_loss`.
        """
        if forward.proves:
            self._loss_ways.add(self._loss_way(root, forward))

    @staticmethod
    def _loss_way(root: Any, forward: ForwardContext) -> tuple[int, type]:
        """Return over how many nodes of the graph a loss was come to, without those of proofs, and the last of them."""
        node = edge_of(root)[0]
        number = 0 if node is None else _torch.order_of(node)
        first, behind = forward.proofs
        own = behind - first if number >= behind else 0
        return number - own - (forward.latest or 0), type(node)

    def refuse_mean(
        self, capture: CaptureContext, roots: Sequence[Any], grads: Sequence[Tensor | None], forward: ForwardContext
    ) -> None:
        """Refuse a mean over the batch whose gradients do not follow their scale, between it and the layers.

        Args:
            capture: Whose model it is.
            roots: Where the backward starts.
            grads: Gradients given for them, None where none is.
            forward: Whose outputs the loss is made of.

        Raises:
            LossReductionError: They do not.
        """
        if not self.probes:
            return
        if self._without_scale:
            raise LossReductionError(self._without_scale)
        refuse_means_without_scale(capture, roots, grads, forward)

    def refuse_padding(
        self, capture: CaptureContext, roots: Sequence[Any], found: Iterable[Path], forward: ForwardContext
    ) -> None:
        """Refuse a loss that takes padding in, or divides by a length that follows the batch.

        Args:
            capture: Whose model it is.
            roots: Where the backward starts.
            found: The ways through the loss.
            forward: Whose outputs it is made of.

        Raises:
            LossReductionError: It does.
        """

        def gradients(edges: Sequence[Edge]) -> Sequence[Tensor | None]:
            given = [torch.ones_like(root) for root in roots]
            with capture.listening(Unheard()), backward_entry.unseen():
                ends: list[Any] = [GradientEdge(*edge) for edge in edges]
                return torch.autograd.grad(roots, ends, given, retain_graph=True, allow_unused=True)

        if self.probes:
            self.padding.refuse_losses(found, forward, gradients)

    def look_at_loss(self, capture: CaptureContext, roots: Sequence[Any], forward: ForwardContext) -> None:
        """Look for what has no place between a loss and a model's outputs.

        Args:
            capture: Whose model it is.
            roots: Where the backward starts.
            forward: Whose outputs the loss is made of.

        Raises:
            UncoveredParameterError: A trainable parameter that is no part of the model.
            SampleMixingError: A comparison of samples with other samples' targets.
            UnsupportedModelError: A hook on the node of a layer, in a forward that is proved.
        """
        if self.probes and not forward.is_dummy:

            def is_own(parameter: nn.Parameter) -> bool:
                return any(parameter is own for own in capture.model.parameters())

            refuse_beyond_outputs(roots, forward, self.loss_sizes, is_own=is_own)
            if forward.unproven:
                refuse_node_hooks([edge_of(root)[0] for root in roots], forward)

    def begin(self, capture: CaptureContext, call: ModuleCall) -> None:
        """Decide whether to ask, and run the forward with one sample more.

        Args:
            capture: Whose latest forward it is.
            call: What is about to run.

        Raises:
            UnsupportedModelError: torch splits sequences over ranks, and nobody says over which.
        """
        if not self._splits_sequences:
            refuse_split_positions(capture.model)
        forward = capture.forward
        records = forward.batch_size if self.records_of is None else self.records_of(forward.batch_size)
        forward.proves = records > 1
        forward.unproven = self.unchecked.begin(forward.batch_size, probes=self.probes, records=records)
        if self.probes and capture.gathering is not None:
            inputs = _tree.tensors((call.args, call.kwargs))
            forward.unproven = capture.gathering.hold(able=min(forward.batch_size, records) > 1, inputs=inputs)
        if self.probes and not forward.is_dummy:
            self.padding.begin((call.args, call.kwargs), forward)
        asks = self.asks(capture)
        self._buffers = Buffers(capture.model) if asks else None
        self._state = ModuleState(capture.model) if asks or self._remembers else None
        if asks and not capture.sites.layouts:
            forward.grown = self._grown(capture, call)
        self._randomness = Randomness(_used(capture, call)) if asks else None

    def end(self, capture: CaptureContext, call: ModuleCall, output: Any) -> Any:
        """Weigh the evidence on a forward; read it once more where sizes had to be trusted and were wrong.

        Args:
            capture: Whose latest forward it is.
            call: What ran.
            output: What it returned.

        Returns:
            The output of the last reading.
        """
        randomness, state, self._randomness, self._state = self._randomness, self._state, None, None
        self._remembers = self._remembers or (state is not None and state.changed())
        # One that is asked about only now is taken to draw what the others drew.
        self._drew = drew = self._drew if randomness is None else randomness.drawn()
        forward, call, begun = capture.forward, ModuleCall(*capture.bags.as_rows(*call)), _torch.next_order()
        parts = self._parts(capture, output)
        probe = self._probed(capture, parts)
        failed = probe is not None and _on_any(capture, bool(probe.failures))
        if failed and forward.guessed and forward.grown is None:
            # What sizes suggested is wrong: ask shapes, and read the forward once more.
            forward.grown = self._grown(capture, call)
            if forward.grown is not None:
                _begin_anew(state)
                output = capture.again(call)
                forward, begun = capture.forward, _torch.next_order()
                parts = self._parts(capture, output)
                probe = self._probed(capture, parts)
        if probe is not None:
            self._refuse_mixing(capture, call, probe)
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._refuse_data(capture, call, buffers, state)
        if self.asks(capture) and (buffers is not None or capture.forward.met):
            self._refuse_dependence(capture, call, parts, probe, drew=drew, state=state)
            self._refuse_own_backwards(capture, call, parts, probe, state=state)
            self.unchecked.tell()
            note([] if probe is None else probe.begun)
        self._refuse_padding(capture, call, output, probe, state=state)
        if self.asks(capture) or not self.probes:
            capture.forward.prove()
        forward.proofs = begun, _torch.next_order()
        return output

    def _refuse_mixing(self, capture: CaptureContext, call: ModuleCall, probe: Probe) -> None:
        """Refuse a model whose gradients of one sample's outputs lead to other samples."""
        forward, model, module = capture.forward, capture.model, call.module
        inputs: Any = call.args, dict(call.kwargs)
        size, axis = forward.batch_size, forward.batch_axis

        def where() -> str:
            if capture.gathering is not None and capture.gathering.divides:
                return _WHERE_ON_ONE
            return where_dependence_starts(model, module, inputs, batch_size=size, axis=axis)

        with _sharing(capture, "whose rows are whose"):
            probe.verdict(where)
        if forward.proves:
            self.unchecked.ran(ROWS)

    def _refuse_data(
        self, capture: CaptureContext, call: ModuleCall, buffers: Buffers, state: ModuleState | None
    ) -> None:
        """Refuse a model whose buffers follow the samples."""
        forward, inputs = capture.forward, (call.args, dict(call.kwargs))

        def run(given: Any) -> Any:
            _begin_anew(state)
            return capture.again(ModuleCall(call.module, *given))

        with capture.aside(), restored(capture.model), _sharing(capture, "buffers"):
            buffers.refuse_data(inputs, run=run, batch_size=forward.batch_size, axis=forward.batch_axis)

    def _grown(self, capture: CaptureContext, call: ModuleCall) -> Grown | None:
        """Run a forward with one sample more; None where it cannot."""
        inputs: Any = (call.args, dict(call.kwargs))
        if _has_packed(inputs):
            return None
        on_rows, *inputs = capture.bags.as_rows(call.module, *inputs)

        def run(given: Any) -> list[Tensor]:
            own, args, kwargs = as_flat(on_rows, *given)
            return _parts_of(capture.run(own, args, kwargs))

        forward = capture.forward
        with capture.substitution.unwatched(), Exchanges() as exchanges:
            found = grown(capture.model, run, tuple(inputs), batch_size=forward.batch_size, axis=forward.batch_axis)
        if not self._may_exchange:
            exchanges.refuse(capture.model)
        forward.stays_small = found is None
        return found

    def _parts(self, capture: CaptureContext, output: Any) -> list[Tensor]:
        """Return what is looked at of a forward that is proved."""
        return _parts_of(output) if self._buffers is not None or self.asks(capture) else []

    def _probed(self, capture: CaptureContext, found: list[Tensor]) -> Probe | None:
        """Return what the latest forward's outputs show of it; None where there is nothing to prove, or no output."""
        if not self.asks(capture):
            return None
        forward = capture.forward
        if forward.grown is not None:
            axes = compared(shapes_of(found), forward.grown.outputs, forward.batch_size)
            capture.sites.outputs = () if axes is None else axes
        if self.hands_on:
            refuse_other_axis(capture.model, found, forward)
        probe = _probe_outputs(capture, found)
        if probe is None:
            self.unchecked.missed("the model returned no tensor with a gradient", ROWS)
        return probe

    def _refuse_dependence(
        self,
        capture: CaptureContext,
        call: ModuleCall,
        parts: list[Tensor],
        probe: Probe | None,
        *,
        drew: bool,
        state: ModuleState | None,
    ) -> None:
        """Refuse a model whose outputs for one sample change with the others."""
        if _has_packed((call.args, dict(call.kwargs))):
            self.unchecked.missed("samples of a packed sequence cannot be exchanged", REPLACED, FEWER, BEHIND)
            return
        forward = capture.forward
        # Ranks that share samples run the model equally often, whatever each of them finds.
        batch = self._batch(capture, call, parts, probe, outputs=() if drew or capture.gathering is not None else parts)

        def run(given: Any) -> list[Tensor]:
            return _parts_of(capture.run(call.module, *given))

        def run_anew(given: Any) -> list[Tensor]:
            _begin_anew(state)
            return run(given)

        with capture.substitution.unwatched(), _sharing(capture, "batch independence"):
            # Copies of one sample may be refused, and show nothing for others.
            unchecked = self.unchecked if forward.proves else Unchecked()
            refuse_dependence(capture.model, run_anew, batch, unchecked)
            if self._remembers or state is None:
                # What was met in a forward that nobody was to ask about may begin to remember there.
                refuse_memory(capture.model, state or ModuleState(capture.model), run, batch, unchecked)

    def _refuse_own_backwards(
        self,
        capture: CaptureContext,
        call: ModuleCall,
        parts: list[Tensor],
        probe: Probe | None,
        *,
        state: ModuleState | None,
    ) -> None:
        """Refuse a model whose own backward functions, hooks or detached values make gradients follow the batch."""
        trained, self._without_scale = [part for part in parts if part.requires_grad], ""
        if not (capture.forward.proves and trained):
            return
        own = has_own_backwards(trained, capture.forward)
        if own and probe is not None:
            self._without_scale = without_scale(capture, probe.begun)
        if not (own or capture.forward.around.rows.detaches):
            return
        if capture.gathering is not None or _has_packed((call.args, call.kwargs)):
            self.unchecked.missed("samples cannot be exchanged", BACKWARDS)
            return
        batch = self._batch(capture, call, parts, probe)

        def run(given: Any) -> list[Tensor]:
            _begin_anew(state)
            return _parts_of(capture.run(call.module, *given))

        with capture.substitution.unwatched():
            refuse_backwards_of_the_batch(capture, run, batch, self.unchecked, alone=own)

    def _refuse_padding(
        self, capture: CaptureContext, call: ModuleCall, output: Any, probe: Probe | None, *, state: ModuleState | None
    ) -> None:
        """Refuse a model whose outputs for a sample follow how far it was padded."""
        forward = capture.forward
        # Ranks that gather parameters together would run the model differently often.
        if not self.probes or forward.is_dummy or capture.gathering is not None:
            return
        if not (self.padding.is_pending() or self.asks(capture)):
            return
        parts = _parts_of(output)
        batch, axes = self._batch(capture, call, parts, probe, outputs=parts), capture.sites.outputs
        if probe is None and len(axes) == len(parts):
            batch = replace(batch, maps=[RowMap("axis", axis) if axis >= 0 else None for axis in axes])

        def run(given: Any) -> list[Tensor]:
            _begin_anew(state)
            return _parts_of(capture.run(call.module, *given))

        with capture.substitution.unwatched():
            self.padding.refuse(capture.model, run, batch, forward, self.unchecked)

    def _batch(
        self,
        capture: CaptureContext,
        call: ModuleCall,
        parts: list[Tensor],
        probe: Probe | None,
        *,
        outputs: Sequence[Tensor] = (),
    ) -> Batch:
        """Return what the latest forward was called with, for runs on other batches."""
        forward = capture.forward
        known = {} if probe is None else {id(start.edge.tensor): start.row_map for start in probe.begun}
        if self.hands_on:
            rows = RowMap("axis", forward.batch_axis)
            known |= {id(found): rows for found in parts if _has_samples(found, forward)}
        return Batch(
            (call.args, dict(call.kwargs)),
            forward.batch_size,
            forward.batch_axis,
            gathered=forward.gathered,
            maps=[known.get(id(found)) for found in parts],
            outputs=outputs,
            seed=self.unchecked.forwards,
            again=self.unchecked.is_scheduled_again and not forward.met,
        )


def _begin_anew(state: ModuleState | None) -> None:
    """Put back what modules held when the forward began that is asked about."""
    if state is not None:
        state.restore()


def _parts_of(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output; of one that lies on several ranks, this rank's part."""
    return [_torch.part_of(found) for found in outputs_of(output)]


def _sharing(capture: CaptureContext, what: str) -> AbstractContextManager[None]:
    """Return a context whose errors are those of all ranks that share samples: none of them goes on by itself."""
    return nullcontext() if capture.gathering is None else capture.gathering.sharing(what)


def _on_any(capture: CaptureContext, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
    """Return whether something holds on any rank that shares samples with this one."""
    return holds if capture.gathering is None else capture.gathering.any_sharing(holds)


def _used(capture: CaptureContext, call: ModuleCall) -> list[Tensor]:
    """Return tensors on every device that a forward uses."""
    return [*capture.model.parameters(), *capture.model.buffers(), *_tree.tensors((call.args, dict(call.kwargs)))]


def _has_samples(output: Tensor, forward: ForwardContext) -> bool:
    """Return whether the axis where samples are expected has one row for each of them."""
    return output.dim() > forward.batch_axis and output.shape[forward.batch_axis] == forward.batch_size


def _has_packed(inputs: Any) -> bool:
    """Return whether a packed sequence is among a model's inputs: its samples cannot be repeated or exchanged."""
    return next(iter(packed_inputs(inputs)), None) is not None


def _probe_outputs(capture: CaptureContext, outputs: list[Tensor]) -> Probe | None:
    """Probe the latest forward from the model's outputs.

    Args:
        capture: Whose forward it was.
        outputs: The model's output tensors.

    Returns:
        The probe with what it found; None where there was no output to start from.

    Raises:
        BatchAxisError: No output has an axis that could hold the samples.
    """
    forward, sites = capture.forward, capture.sites
    first: Probe | None = None
    states = sites.states()
    for begun in starts(outputs, forward=forward, known=sites.outputs):
        probe = Probe(set(), capture.describe_module, begun=begun)
        if first is not None:
            # Forget what a wrong reading of the outputs seemed to show.
            sites.restore(states)
        with capture.listening(probe):
            ask(probe, begun, batch_size=forward.batch_size, run=capture.run_backward)
        if not probe.failures:
            return probe
        first = first or probe
    return first
