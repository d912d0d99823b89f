"""`Evidence`: what a model is asked in its first forward and in later ones: whose rows are whose, whether samples mix.

Before such a forward runs, it is rehearsed on copies of its inputs: without gradients with another number of samples
(whose shapes tell where samples lie), then as the user will run it; gradients of some samples alone, other batches and
buffers are looked at. Everything is put back, and the user's own forward comes last: whatever its hooks and methods
write down is of that one. Only a forward that meets something new unawares is looked at afterwards.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture import backward_entry
from ghostclip.capture.call_sites import CONSTANT, MAX_WAYS, UNKNOWN, Resized
from ghostclip.capture.context import CaptureContext, ModuleCall, has_rows_of_samples, outputs_of, tracked_among
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import hooks_before_now
from ghostclip.capture.inputs import as_flat, packed_inputs
from ghostclip.capture.nodes import Edge, edge_of
from ghostclip.capture.ranks import Exchanges, on_any, refuse_split_positions
from ghostclip.capture.row_maps import FOLDED, WHOLE, RowMap, refuse_other_axis
from ghostclip.capture.substitution import gradients_at
from ghostclip.checks.batches import Batch, Randomness, resized, uncounted
from ghostclip.checks.custom_backwards import (
    has_custom_backwards,
    is_linear,
    refuse_backwards_of_the_batch,
    refuse_means_without_scale,
    without_scale,
)
from ghostclip.checks.dependence import SHARED, rare_sample, record_shared, spread_out, where_dependence_starts
from ghostclip.checks.independence import (
    AttributeKey,
    Run,
    ScalarKey,
    refuse_dependence,
    refuse_memory,
    scalars_of,
    scalars_that_follow,
    tensors_in,
)
from ghostclip.checks.linear_paths import Path
from ghostclip.checks.loop_record import LayerRows, Loop, LoopRecord
from ghostclip.checks.loss_graph import (
    Sizes,
    Unheard,
    has_hooks,
    hooks_below,
    input_separates_samples,
    mark_proved,
    refuse_beyond_outputs,
    refuse_hooks_of_layers,
    takes_outputs_alone,
)
from ghostclip.checks.module_state import ModuleState, restored
from ghostclip.checks.padding import Padding
from ghostclip.checks.probe import GradientSource, Probe, Start, run_probe, starts, weightings
from ghostclip.checks.state import Runs, StateWatch, StateWrite
from ghostclip.checks.unchecked import BACKWARDS, BEHIND, BESIDE, FEWER, ORDER, REPLACED, ROWS, SCALARS, Unchecked
from ghostclip.errors import GhostClipError, LossReductionError, SampleMixingError, UncoveredParameterError

# So many samples in reverse show whether layers have them in the order of the batch.
_TURNED: Final = 4
_SINGLE_ROWS: Final = (
    "{model}: its layers met single rows of the batch without an axis for them (x[i], for row in x), so that nothing "
    "is known of its outputs: whose they are, and whether samples mix. Give each layer the whole batch, or rows with "
    "an axis, x[i:i+1]; BatchMemoryManager computes a batch in parts where memory is short."
)
_MIXED_INPUT: Final = (
    "an input of shape {shape} of {module}.forward, which was computed from outputs of an earlier forward, brings "
    "samples together (a mean over the batch, rows in another order): the gradient of one sample would depend on "
    "others, and no clipping bounds that. Compute each sample's input from that sample's outputs alone, its row in its "
    "place."
)
_OF_ALL_SAMPLES: Final = (
    "{model} returns an output of shape {shape} without an axis for the samples, which leads to parameters: the next "
    "stage would send the gradient of all samples together for it. Return one row for each sample, or detach it."
)
_WHERE_ON_ONE: Final = "Run ghostclip.validate on a smaller model of this kind on one device, which names the module."


class Evidence:
    """Proves, on the forwards of one model, which rows belong to which sample and that samples do not mix."""

    def __init__(self, *, probes: bool, in_parts: bool = False, numbers: random.Random | None = None) -> None:
        """Set what is to be proved; nothing is known of the model yet."""
        # `in_parts`: ranks have parts of the model, and may exchange what they compute with them. `numbers` say in
        # which forwards to ask again, of ranks that have positions of the same samples: they may exchange them, and run
        # the model equally often. None where there are no such ranks.
        self.probes = probes  # whether any is asked for
        self._splits_sequences = numbers is not None  # ranks have positions of the same samples
        self._may_exchange = in_parts or self._splits_sequences
        self.unchecked = Unchecked(numbers)  # what could not be asked
        self.loss_sizes: Sizes = {}  # what was seen of losses: see `ghostclip.checks.loss_graph`
        self.loop = Loop(self.unchecked, is_on=probes and not self._may_exchange)  # that calls the model
        self.padding = Padding()  # what is known of axes that are as long as the longest sample of a batch
        # returns how many of a forward's samples are no copies of others; None where none are
        self.records_of: Callable[[int], int] | None = None
        # whether outputs go to another part of the model, which takes their rows for samples as they lie
        self.hands_on = False
        self._loss_ways: set[Any] = set()  # proved ways to compute losses, see `_loss_depth`
        # Scalars of the model's that follow the batch.
        self._following = frozenset[ScalarKey]()
        # How many batches in a row could not tell of a known loss whether it takes samples together.
        self._undecided = 0
        # Why means are refused, whatever the loss is.
        self._without_scale = ""
        self._watch: StateWatch | None = None  # watches what forwards write to the model's state
        # Whether the forward that runs was to be proved as it began.
        self._proving = False
        self._reruns = False  # whether it is run more often than the user has it run
        # Whether what is done with its outputs is recorded.
        self.records = False
        self._state: ModuleState | None = None  # what the modules held before the forward that runs
        self._rehearsed: _Rehearsed | None = None  # what a rehearsal of it has shown
        # The tensors that the forward that runs was called with, and their versions.
        self._given: list[tuple[Tensor, int]] = []
        # By the called module, places and shapes of inputs that all samples share.
        self._shared = set[tuple[int, ...]]()
        self._drew = True  # whether the latest proved forward drew random numbers
        # Whether forwards leave something in the modules, which later ones may follow.
        self._remembers = False
        self._randomness: Randomness | None = None  # the generators' states as it began
        # The number of the first node of the graph that the forward that runs may make.
        self._began = 0
        # Attributes of modules in which forwards leave values of samples, by the called module, and the one that runs;
        # shapes of what the resized one left.
        self._called, self._left_by = 0, dict[int, tuple[AttributeKey, ...]]()
        self._resized_left: dict[AttributeKey, tuple[int, ...]] = {}

    def renew(self) -> None:
        """Forget all proofs, so that the next forward is proved: the model was changed."""
        self.unchecked.renew()
        self.loss_sizes.clear()
        self.padding.renew()
        self._loss_ways.clear()
        if self._watch is not None:
            self._watch.renew()

    def must_prove(self, capture: CaptureContext) -> bool:
        """Return whether the latest forward is to be proved: it is unproved and has more than one sample."""
        due = self.probes and capture.forward.unproven and capture.forward.batch_size > 1
        return due and (capture.gathering is None or capture.gathering.may_prove())

    def must_prove_loss(self, root: Any, forward: ForwardContext, *, is_scalar: bool = False) -> bool:
        """Return whether a loss is to be proved: its forward is unproved, or it is computed in a new way."""
        # A hook on its way may do another thing in every step. `is_scalar`: hooks between it and the outputs can change
        # nothing. False as well for a forward of one sample.
        if forward.batch_size < 2 or not self.probes:
            return False
        way = self._loss_depth(root, forward)
        is_new = way not in self._loss_ways and len(self._loss_ways) < MAX_WAYS
        asked_again = bool(self._undecided and forward.losses) and self.unchecked.asks_after(self._undecided)
        return forward.unproven or is_new or asked_again or has_hooks([root], forward, outputs_alone=is_scalar)

    def check_known(self, capture: CaptureContext, root: Tensor, forward: ForwardContext, *, mean: bool) -> None:
        """Run losses of known functions on other batches; store in the forward why they are refused."""
        size, axis = forward.batch_size, forward.batch_axis
        # Ranks that hold the model in parts would run it differently often.
        copied, unchecked = capture.substitution.copied if capture.gathering is None else None, self.unchecked
        # Ranks that exchange something ask equally often, of the same samples.
        found = [[] if self._may_exchange else one.alike(size, axis) for one in forward.losses]
        # A checkpoint runs its part of a forward again in the backward, where nothing is to be watched either.
        with capture.watching(on=False):
            refusals = [
                one.refusal(size, axis, mean=mean, unchecked=unchecked, copied=copied, rare=rare_sample(alike))
                for one, alike in zip(forward.losses, found, strict=True)
            ]
        tells = None not in refusals and not any(one.all for alike in found for one in alike)
        self._undecided = 0 if tells else self._undecided + 1
        forward.alone = refusals == [""] and forward.losses[0].node is edge_of(root)[0]
        forward.refusal = next(filter(None, refusals), "")

    def record_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Note what a loop does with the outputs of a forward that was looked at."""
        self.loop.take_outputs(outputs)

    def proved_loss(self, root: Any, forward: ForwardContext) -> None:
        """Record that a loss was proved, unless its forward counts as no evidence."""
        if not forward.proves:
            return
        self._loss_ways.add(self._loss_depth(root, forward))
        # A proof of the forward compared its outputs alone, and of values that the loss takes from inside the model
        # none, which is said; unless nothing at all was compared (it returns no rows of samples): that was said before.
        if not takes_outputs_alone(root) and not self.unchecked.reason(REPLACED):
            self.unchecked.missed("the loss takes them from inside the model", BESIDE)
            self.unchecked.warn()

    @staticmethod
    def _loss_depth(root: Any, forward: ForwardContext) -> tuple[int, type]:
        """Return what tells ways to compute a loss apart: nodes made since the last layer, and the last one's class."""
        node = edge_of(root)[0]
        number = 0 if node is None else _torch.order_of(node)
        first, behind = forward.proofs
        proof_nodes = behind - first if number >= behind else 0
        return number - proof_nodes - (forward.latest or 0), type(node)

    def refuse_mean(self, capture: CaptureContext, roots: Sequence[Any], forward: ForwardContext) -> None:
        """Refuse a mean over the batch whose gradients do not follow their scale, between it and the layers."""
        if not self.probes:
            return
        if self._without_scale:
            raise LossReductionError(self._without_scale)
        refuse_means_without_scale(capture, roots, forward)

    @staticmethod
    @contextmanager
    def unseen(capture: CaptureContext, roots: Sequence[Any], forward: ForwardContext) -> Iterator[None]:
        """Yield for backwards that prove a loss: what hooks and backward functions write is put back."""
        # They may reach into the model, parts of which run again then.
        with restored(capture.model, arguments=hooks_below(roots, forward)), capture.substituted():
            yield

    def refuse_padding(
        self,
        capture: CaptureContext,
        roots: Sequence[Any],
        path_groups: Iterable[Sequence[Path]],
        forward: ForwardContext,
        is_of_one: Callable[[Path], bool],
    ) -> None:
        """Refuse a loss that takes padding in, or divides by a length that follows the batch."""
        # `is_of_one`: whether the values at the end of a path are known to be one sample's.

        def gradients(edges: Sequence[Edge]) -> Sequence[Tensor | None]:
            root_grads = [torch.ones_like(root) for root in roots]
            with capture.listening(Unheard()), backward_entry.unseen():
                return gradients_at(roots, root_grads, edges)

        if self.probes:
            with self.unseen(capture, roots, forward) if forward.padded else nullcontext():
                self.padding.refuse_losses(path_groups, forward, gradients, is_of_one, roots=list(map(edge_of, roots)))

    @contextmanager
    def around(self, capture: CaptureContext, roots: Sequence[Any], forward: ForwardContext) -> Iterator[None]:
        """Yield while a loss is examined; then refuse one for how it was computed, or for what its backward holds."""

        def gradients() -> list[Tensor]:
            whole, root_grads = None, [torch.ones_like(root) for root in roots]
            while whole is None:
                layers = LayerRows(forward)
                with self.unseen(capture, roots, forward), capture.listening(layers):
                    whole = capture.run_backward(roots, root_grads)
            return layers.rows

        is_custom = capture.gathering is None and has_custom_backwards(roots, forward)
        with self.loop.looking_at_loss(roots, forward, gradients if is_custom else None):
            yield

    def check_loss(self, capture: CaptureContext, roots: Sequence[Any], forward: ForwardContext) -> None:
        """Refuse foreign parameters, cross-sample targets and hooks on layers between a loss and the outputs."""
        # Trainable parameters that are no part of the model, comparisons of samples with other samples' targets and, in
        # a forward that is proved, hooks on the nodes of layers are refused.
        if self.probes and not forward.is_dummy:

            def is_own(parameter: nn.Parameter) -> bool:
                return any(parameter is candidate for candidate in capture.model.parameters())

            refuse_beyond_outputs(roots, forward, self.loss_sizes, is_own=is_own)
            if forward.unproven:
                refuse_hooks_of_layers(roots, forward)

    def begin(self, capture: CaptureContext, call: ModuleCall, inputs: Sequence[Tensor]) -> None:
        """Decide whether the coming forward is to be proved; if so, run it first as a rehearsal."""
        # Refused where torch splits sequences over ranks, and nobody says over which.
        if not self._splits_sequences:
            refuse_split_positions(capture.model)
        forward, self._called = capture.forward, id(call.module)
        if LoopRecord.open is not None or self.loop.may_keep:
            self.loop.look_at_inputs(inputs, forward)
        records = forward.batch_size if self.records_of is None else self.records_of(forward.batch_size)
        forward.proves = records > 1
        forward.unproven = self.unchecked.begin(forward.batch_size, probes=self.probes, records=records)
        self._began = _torch.next_order()
        self._given = [(tensor, _torch.version(tensor)) for tensor in inputs]
        if self.probes and capture.gathering is not None:
            forward.unproven = capture.gathering.must_prove(able=min(forward.batch_size, records) > 1, inputs=inputs)
        if self.probes and not forward.is_dummy:
            self.padding.begin(call.module, inputs, forward)
        due = self.must_prove(capture)
        self._proving, watch = due, self._watched(capture)
        # In these it runs more often than the user has it run.
        self._reruns = reruns = due or (capture.gathering is None and self.probes and self.padding.is_pending())
        self._state = state = _state_of(capture, call, outside=reruns) if reruns or self._remembers else None
        self.records = capture.gathering is None and (reruns or self.loop.asks or self.loop.record is not None)
        if watch is not None:
            watch.begin(proves=due)
        self._randomness = Randomness(_used(capture, call)) if due else None
        self._rehearsed = None
        if reruns and not forward.is_dummy:
            self._run_before(capture, call, state, watch)

    def _refuse_mixed_inputs(self, capture: CaptureContext, call: ModuleCall) -> None:
        """Refuse inputs computed from an earlier forward's outputs on a way that mixes samples."""
        linked = [one for one in _tree.tensors(call.inputs) if one.grad_fn is not None and one.is_floating_point()]
        if not linked or capture.gathering is not None or _has_packed(call.inputs):
            return
        forward = capture.forward
        with self.unseen(capture, linked, forward), capture.listening(Unheard()):
            for tensor in linked:
                linear = is_linear([tensor], capture, forward)
                if not input_separates_samples(tensor, forward, linear=linear):
                    shape, module = tuple(tensor.shape), type(call.module).__name__
                    raise SampleMixingError(_MIXED_INPUT.format(shape=shape, module=module))

    def _run_before(
        self, capture: CaptureContext, call: ModuleCall, state: ModuleState | None, watch: StateWatch | None
    ) -> None:
        """Run a forward before the user's: with another number of samples for shapes, then to prove it."""
        with _unseen(capture, call, state):
            # Masks of positions are as long as others in each batch.
            size = capture.forward.batch_size
            square = any(shape[:2] == (size, size) for shape in _tree.shapes_of(call.inputs))
            if self._proving and (square or not capture.sites.layouts):
                capture.forward.resized = self._resized(capture, call)
                if watch is not None:
                    watch.undo()
            record_shared(call.inputs, size, self._shared, id(call.module))
            # A forward uses iterators up.
            once = capture.calls_samplers or any(isinstance(leaf, Iterator) for leaf in _tree.leaves(call.inputs))
            if capture.gathering is None and not once:
                self._rehearse(capture, call)
        if watch is not None:
            watch.undo()
            if self._rehearsed is not None:
                watch.drop_copies()

    def _rehearse(self, capture: CaptureContext, call: ModuleCall) -> None:
        """Prove a forward on a run of its own before the user's; one that raises is left to the user's run."""
        # One that raises is left to the user's own run, which raises as well, or is looked at afterwards.
        forward = capture.forward

        def read() -> Any:
            try:
                return capture.rehearse(_copied_call(call))
            except GhostClipError:
                raise
            except Exception as error:
                raise _UsersError from error

        try:
            with capture.rehearsing():
                _, rows = self._prove(capture, call, read, again=lambda: _copied_call(call), aside=True)
                self._rehearsed = _Rehearsed(rows, capture.forward.padded)
                forward.resized, forward.has_float16 = capture.forward.resized, capture.forward.has_float16
                forward.rehearsed, self._proving = True, False
        except _UsersError:
            # The user's code is about to run.
            return
        finally:
            capture.forward = forward
            # Hooks of others that were set before belong to the rehearsal.
            forward.hooks_before = hooks_before_now()

    def end(self, capture: CaptureContext, call: ModuleCall, output: Any) -> Any:
        """Prove the forward that ended, unless a rehearsal has; return its output, or that of a second reading."""
        output = self._ended(capture, call, output)
        if self._following:
            self._record_scalars(capture, output)
        return output

    def _ended(self, capture: CaptureContext, call: ModuleCall, output: Any) -> Any:
        """Prove an ended forward unless a rehearsal did or it is steady; return its output."""
        rehearsed, self._rehearsed, versioned, self._given = self._rehearsed, None, self._given, []
        writes, due = self._written(capture), self.must_prove(capture)
        if due or rehearsed is not None:
            self._refuse_mixed_inputs(capture, call)
        if rehearsed is not None and not (capture.forward.new_ways or writes):
            rehearsed.hand_on(self._shown(capture, output), capture.forward)
            capture.forward.prove()
            return output
        if not (due or writes or self._reruns or self._state is not None):
            # A steady one: there is nothing to weigh.
            if not self.probes:
                capture.forward.prove()
            return output
        if due:
            # A batch that was changed in place since gives other outputs, as one that meets other random numbers.
            self._drew |= any(_torch.version(tensor) != version for tensor, version in versioned)
        with _unseen(capture, call) if due or writes or self._reruns else nullcontext():
            output, rows = self._prove(capture, call, lambda: output, again=lambda: call, writes=writes)
        _Rehearsed(rows, capture.forward.padded).hand_on(self._shown(capture, output), capture.forward)
        return output

    def _shown(self, capture: CaptureContext, output: Any) -> list[Tensor]:
        """Return the tensors of a forward's output, and those that it left in attributes of modules."""
        left = self._left_by.get(self._called, ())
        held = tensors_in(capture.model.modules()) if left else {}
        return [*_parts_of(output), *(held.get(key, torch.empty(0)) for key in left)]

    def _record_left(self, capture: CaptureContext, output: Any) -> None:
        """Record the attributes of modules in which the forward left values of samples, which a loss may read."""
        resized = capture.forward.resized
        if resized is None:
            return
        returned = set(map(id, _parts_of(output)))
        self._left_by[self._called] = tuple(
            key
            for key, tensor in tensors_in(capture.model.modules()).items()
            if tensor.grad_fn is not None
            and _torch.order_of(tensor.grad_fn) >= self._began
            and id(tensor) not in returned
            for axes in [resized.compared(_tree.shapes_of(tensor), (self._resized_left.get(key, ()),))]
            if axes is not None and axes[0] >= 0
        )

    def _record_scalars(self, capture: CaptureContext, output: Any) -> None:
        """Record in the forward the nodes of output scalars that follow the batch."""
        holding = {key[0] for key in self._following if isinstance(key, tuple)}
        modules = [module for module in capture.model.modules() if id(module) in holding] if holding else []
        scalars = scalars_of(modules, _parts_of(output))
        capture.forward.following = [scalars[key].grad_fn for key in self._following if key in scalars]

    def _prove(
        self,
        capture: CaptureContext,
        call: ModuleCall,
        read: Callable[[], Any],
        *,
        again: Callable[[], ModuleCall],
        writes: frozenset[StateWrite] | None = None,
        aside: bool = False,
    ) -> tuple[Any, dict[int, RowMap]]:
        """Make all proofs of a forward, running it again where its rows were misread; return (output, row maps)."""
        # `read` returns what the call returned; `again` what is to be called to read it once more. `writes`: what it
        # wrote of the model's state, if that is to be proved; None where nobody has looked yet. `aside`: nobody but
        # this takes the output: its graph is let go as soon as it is not needed. Returns the output of the last
        # reading, and how the rows of which of its tensors map to samples.
        output = read()
        writes = self._written(capture) if writes is None else writes
        randomness, state, self._randomness, self._state = self._randomness, self._state, None, None
        self._remembers = self._remembers or (state is not None and state.changed_inside())
        # One that is asked about only now is taken to draw what the others drew.
        self._drew = self._drew if randomness is None else randomness.drawn()
        call, states = ModuleCall(*capture.bags.as_rows(*call)), capture.sites.states()
        read_again = partial(_read_again, capture, again, state)
        output, begun, parts, tracked, probe = self._read(capture, call, output, read_again)
        if probe is not None:
            self._refuse_mixing(capture, call, probe)
        rows, due = _rows_of(probe, parts), self.must_prove(capture) and bool(self._proving or capture.forward.new_ways)
        backs = due and self._custom_backwards(capture, parts, () if probe is None else probe.begun)
        parts = parts or self._shown(capture, output)
        seen = _ReadForward(call, parts, None if probe is None else rows, state, self._shown, tracked)
        if aside:
            seen, output, probe = seen.without_graph(), None, None
        parts = []
        if writes:
            self._refuse_data(capture, call, writes, state)
        if due:
            try:
                self._refuse_dependence(capture, seen)
            except SampleMixingError as error:
                with _turned(capture, rows, states, error):
                    self._state = state
                    return self._prove(capture, again(), read_again, again=again, writes=writes, aside=aside)
            self._refuse_custom_backwards(capture, seen, has_custom=backs)
        self._refuse_padding(capture, seen)
        if due:
            # Without the outputs, which may be as large as all that a budget of memory leaves.
            seen = replace(seen, parts=[])
            self._refuse_other_rows(capture, seen)
            self.unchecked.warn()
        if self.must_prove(capture):
            capture.forward.prove()
        if writes and self._watch is not None:
            self._watch.put_back()
        capture.forward.proofs = begun, _torch.next_order()
        return output, rows if due else {}

    def _read(
        self, capture: CaptureContext, call: ModuleCall, output: Any, read_again: Callable[[], Any]
    ) -> tuple[Any, int, list[Tensor], frozenset[int], Probe | None]:
        """Probe a forward, again where sizes misled; return (output, first node behind, what `_run_probe` returns)."""
        forward, begun = capture.forward, _torch.next_order()
        parts, tracked, probe = self._run_probe(capture, output)
        failed = probe is not None and on_any(capture.gathering, probe.failed)
        again = False
        if failed and forward.guessed and forward.resized is None:
            forward.resized = self._resized(capture, call)
            again = forward.resized is not None
        elif failed:
            # What was shown of folded data may say how layers behind it are to be read.
            folded = any(site.chosen is not None and site.chosen[0] in FOLDED for site, _ in forward.uses)
            again = on_any(capture.gathering, folded)
        if again:
            output, begun = read_again(), _torch.next_order()
            parts, tracked, probe = self._run_probe(capture, output)
        if self.hands_on:
            _refuse_of_all_samples(capture.model, parts, _rows_of(probe, parts))
        return output, begun, parts, tracked, probe

    def _refuse_mixing(self, capture: CaptureContext, call: ModuleCall, probe: Probe) -> None:
        """Refuse a model whose gradients of one sample's outputs lead to other samples."""
        forward, model, module = capture.forward, capture.model, call.module
        inputs, size, axis = call.inputs, forward.batch_size, forward.batch_axis

        def where() -> str:
            if capture.gathering is not None and capture.gathering.divides:
                return _WHERE_ON_ONE
            return where_dependence_starts(model, module, inputs, batch_size=size, axis=axis)

        with _sharing(capture, "whose rows are whose"):
            probe.verdict(where)
        if forward.proves:
            self.unchecked.ran(ROWS)

    def _watched(self, capture: CaptureContext) -> StateWatch | None:
        """Return what watches the model's state; None where nothing is to be proved."""
        if self.probes and self._watch is None:
            sparing = capture.watches_blocks
            self._watch = StateWatch(capture.model, parameters=capture.gathering is None, sparing=sparing)
        return self._watch if self.probes else None

    def _written(self, capture: CaptureContext) -> frozenset[StateWrite]:
        """Return what the user's forward wrote to the model's state that is still to be proved."""
        watch = self._watched(capture)
        if watch is None:
            return frozenset()
        writes = watch.written()
        if not (self._proving or watch.is_new(writes)):
            return frozenset()
        watch.remember(writes)
        return writes

    def _refuse_data(
        self, capture: CaptureContext, call: ModuleCall, writes: frozenset[StateWrite], state: ModuleState | None
    ) -> None:
        """Refuse a model whose written state depends on the samples: run the forward on others and compare."""
        watch, forward = self._watched(capture), capture.forward
        assert watch is not None, "it has seen the writes"
        if _has_packed(call.inputs) or not (self._proving or capture.gathering is None):
            watch.refuse_unshown(writes)
        runs = Runs(
            Batch(call.inputs, forward.batch_size, forward.batch_axis),
            run=lambda inputs: capture.run(call.module, *_copied(inputs, of=call.inputs)),
            begin=lambda: _restore_state(state),
            drew=self._drew,
            proves=forward.proves,
        )
        with capture.substitution.unwatched(), _sharing(capture, "state") if self._proving else nullcontext():
            watch.prove(writes, runs)

    def watching_backward(self, capture: CaptureContext) -> AbstractContextManager[None]:
        """Return a context for a training backward that refuses writes to the model's state."""
        watch, forward = self._watched(capture), capture.forward
        if watch is None:
            return nullcontext()
        return watch.backward(proves=forward.unproven and not forward.rehearsed, again=forward.runs_again)

    def _resized(self, capture: CaptureContext, call: ModuleCall) -> Resized | None:
        """Run a forward with another number of samples; None where it cannot."""
        if _has_packed(call.inputs):
            return None
        on_rows, *inputs = capture.bags.as_rows(*call)

        def run(altered: Any) -> list[Tensor]:
            module, args, kwargs = as_flat(on_rows, *altered)
            parts = _parts_of(capture.run(module, *_copied((args, kwargs))))
            self._resized_left = {key: tuple(one.shape) for key, one in tensors_in(capture.model.modules()).items()}
            return parts

        forward = capture.forward
        exchanges = Exchanges()
        # Without other ranks there is nothing to exchange, and every operation would be looked at.
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        with capture.substitution.unwatched(), exchanges if together else nullcontext():
            rerun = resized(capture.model, run, tuple(inputs), batch_size=forward.batch_size, axis=forward.batch_axis)
        if not self._may_exchange:
            exchanges.refuse(capture.model)
        forward.stays_small = rerun is None
        return rerun

    def _run_probe(self, capture: CaptureContext, output: Any) -> tuple[list[Tensor], frozenset[int], Probe | None]:
        """Return (tensors to prove, numbers of outputs computed from parameters alone, their probe or None)."""
        self._record_left(capture, output)
        parts, tracked = self._parts(capture, output), tracked_among(output)
        return parts, tracked, self._probed(capture, parts, tracked)

    def _parts(self, capture: CaptureContext, output: Any) -> list[Tensor]:
        """Return the tensors to prove of a forward; refuse outputs in which rows of samples have no axis."""
        due = self.must_prove(capture)
        if due and has_rows_of_samples(output, capture.forward.resized):
            # No proof looks at what layers made of rows without an axis for them.
            raise UncoveredParameterError(_SINGLE_ROWS.format(model=type(capture.model).__name__))
        return self._shown(capture, output) if self._proving or due else []

    def _probed(self, capture: CaptureContext, outputs: list[Tensor], tracked: frozenset[int]) -> Probe | None:
        """Run backwards from outputs and return the probe; None where nothing is to be proved, or no output trains."""
        if not self.must_prove(capture):
            return None
        forward = capture.forward
        tensors = (*capture.model.parameters(), *capture.model.buffers(), *outputs)
        forward.has_float16 = torch.float16 in (forward.autocast, *(tensor.dtype for tensor in tensors))
        if forward.resized is not None:
            shapes = [shape for number, shape in enumerate(forward.resized.outputs) if number not in tracked]
            shapes += [self._resized_left[key] for key in self._left_by.get(self._called, ())]
            axes = forward.resized.compared(_tree.shapes_of(outputs), tuple(shapes))
            capture.sites.outputs = () if axes is None else axes
        if self.hands_on:
            refuse_other_axis(capture.model, outputs, forward)
        probe = _probe_outputs(capture, outputs)
        if probe is None:
            self.unchecked.missed("the model returned no tensor with a gradient", ROWS)
        return probe

    def _refuse_dependence(self, capture: CaptureContext, seen: "_ReadForward") -> None:
        """Refuse a model whose outputs for one sample change with the others."""
        if _has_packed(seen.call.inputs):
            self.unchecked.missed("samples of a packed sequence cannot be exchanged", REPLACED, FEWER, BEHIND)
            return
        forward = capture.forward
        # Ranks that share samples run the model equally often, whatever each of them finds.
        batch = self._batch(capture, seen, () if self._drew or capture.gathering is not None else seen.parts)
        alike = [] if self._may_exchange else batch.alike
        batch = replace(batch, rare=rare_sample(alike))
        if any(one.all for one in alike if one.numbers == 1):
            self.unchecked.ask_again()
        with capture.substitution.unwatched(), _sharing(capture, "batch independence"):
            # Copies of one sample may be refused, and show nothing for others.
            unchecked = self.unchecked if forward.proves else Unchecked()
            refuse_dependence(capture.model, seen.rerun(capture), batch, unchecked)
            if self._remembers or seen.state is None or seen.state.changed():
                # What was met in a forward that nobody was to ask about may begin to remember there.
                run, state = replace(seen, state=None).rerun(capture), seen.state or _state_of(capture, seen.call)
                refuse_memory(capture.model, state, run, batch, unchecked)
        self._find_scalars(capture, seen, replace(batch, outputs=()))

    def _find_scalars(self, capture: CaptureContext, seen: "_ReadForward", batch: Batch) -> None:
        """Add the model's scalars that follow the batch to those known."""
        has_scalars = any(part.requires_grad and not part.dim() for part in seen.parts)
        has_scalars = has_scalars or bool(scalars_of(capture.model.modules(), []))
        if has_scalars and capture.gathering is not None:
            self.unchecked.missed("ranks hold the model in parts", SCALARS)
        elif has_scalars:
            with capture.substitution.unwatched(), capture.substitution.copied() as leaves:
                # What followed one batch need not show in the next.
                self._following |= scalars_that_follow(
                    capture.model, seen.rerun(capture), batch, self.unchecked, parameters=list(leaves.values())
                )

    def _custom_backwards(self, capture: CaptureContext, parts: list[Tensor], starts: Sequence[Start]) -> bool:
        """Return whether custom backwards are used; store why means are refused if they do not scale."""
        trained, self._without_scale = [part for part in parts if part.requires_grad], ""
        has_custom = capture.forward.proves and bool(trained) and has_custom_backwards(trained, capture.forward)
        if has_custom and starts:
            self._without_scale = without_scale(capture, starts)
        return has_custom

    def _refuse_custom_backwards(self, capture: CaptureContext, seen: "_ReadForward", *, has_custom: bool) -> None:
        """Refuse a model whose own backward functions, hooks or detached values make gradients follow the batch."""
        if not capture.forward.proves or not (has_custom or capture.forward.around.rows.detaches):
            return
        if capture.gathering is not None or _has_packed(seen.call.inputs):
            self.unchecked.missed("samples cannot be exchanged", BACKWARDS)
            return
        batch = self._batch(capture, seen)
        with capture.substitution.unwatched():
            refuse_backwards_of_the_batch(capture, seen.rerun(capture), batch, self.unchecked, alone=has_custom)

    def _refuse_other_rows(self, capture: CaptureContext, seen: "_ReadForward") -> None:
        """Refuse a model whose layers get other samples' rows than it seemed, by a forward in reverse order."""
        # Samples that the model sorts may lie in order in one batch by chance: then its first half comes last in this.
        if not capture.forward.proves or self._proves_again(capture):
            return
        if capture.gathering is not None or _has_packed(seen.call.inputs):
            self.unchecked.missed("samples cannot be exchanged", ORDER)
            return
        batch = Batch(seen.call.inputs, capture.forward.batch_size, capture.forward.batch_axis)
        missed = "an input may hold values by the samples' places"
        # Whatever a few of them show but order is asked of all.
        for samples in dict.fromkeys(tuple(spread_out(batch.size, most)[::-1]) for most in (_TURNED, batch.size)):
            has_all = len(samples) == batch.size
            try:
                probe = self._in_another_order(capture, seen, batch.with_lists(samples), len(samples))
            except Exception as error:
                # It may take its samples in their order alone. Where we refuse, no batch decides.
                if has_all and isinstance(error, GhostClipError) and not (batch.has_places or batch.has_lists):
                    raise
                missed = f"the model raised {type(error).__name__}"
                continue
            if probe is None or not probe.failed:
                self.unchecked.ran(ORDER)
                return
            if has_all and not batch.has_places:
                self._refuse_mixing(capture, seen.call, probe)
        self.unchecked.missed(missed, ORDER)

    def _in_another_order(self, capture: CaptureContext, seen: "_ReadForward", inputs: Any, size: int) -> Probe | None:
        """Return the probe of a forward on so many samples in another order; None where no output trains."""
        sites = capture.sites
        states, layouts = sites.states(), dict(sites.layouts)
        _restore_state(seen.state)
        with capture.aside():
            try:
                capture.forward = capture.forward.anew(size)
                output = capture.rehearse(ModuleCall(seen.call.module, *_copied(inputs, of=seen.call.inputs)))
                probe = _probe_outputs(capture, self._shown(capture, output), half=True)
                capture.forward.reordered = True
                return probe
            finally:
                sites.restore(states)
                sites.layouts = layouts

    def _refuse_padding(self, capture: CaptureContext, seen: "_ReadForward") -> None:
        """Refuse a model whose outputs for a sample follow how far it was padded."""
        forward = capture.forward
        # Ranks that gather parameters together would run the model differently often.
        able = self.probes and not forward.is_dummy and capture.gathering is None
        if not able or not (self.padding.is_pending() or self.must_prove(capture)):
            return
        batch, axes = self._batch(capture, seen, seen.parts), capture.sites.outputs
        if seen.rows is None and len(axes) == len(seen.parts):
            batch = replace(batch, maps=[RowMap("axis", axis) if axis >= 0 else None for axis in axes])
        with capture.substitution.unwatched():
            self.padding.refuse(capture.model, seen.rerun(capture), batch, forward, self.unchecked)

    def _batch(self, capture: CaptureContext, seen: "_ReadForward", outputs: Sequence[Tensor] = ()) -> Batch:
        """Return the latest forward's inputs, autocast and what is known of its outputs, for runs on other batches."""
        forward = capture.forward
        known, axes = dict(seen.rows or {}), capture.sites.outputs
        if len(axes) != len(seen.parts):
            axes = (UNKNOWN,) * len(seen.parts)
        parts = list(enumerate(zip(seen.parts, axes, strict=True)))
        if self.hands_on:
            known = {n: _as_taken(part, axis, forward, known.get(n)) for n, (part, axis) in parts}
        return Batch(
            seen.call.inputs,
            forward.batch_size,
            forward.batch_axis,
            # Rows that were drawn are others in another batch.
            gathered=forward.gathered or any(row_map.samples is not None for row_map in known.values()),
            maps=[known.get(number) for number in range(len(seen.parts))],
            # Of what needs no gradient, or holds no samples, nothing is to be proved.
            trained=frozenset(n for n, (part, axis) in parts if part.requires_grad and part.dim() and axis != CONSTANT),
            hands_on=self.hands_on,
            outputs=outputs,
            seed=self.unchecked.forwards,
            again=self._proves_again(capture),
            autocast=forward.autocast,
            shared=capture.gathering is not None,
        )

    def _proves_again(self, capture: CaptureContext) -> bool:
        """Return whether the latest forward is proved by schedule, although it took no new way."""
        ranks, met = capture.gathering, bool(capture.forward.new_ways)
        if ranks is None:
            return self.unchecked.is_scheduled_again and not met
        # Ranks that share samples run the model on the same batches, whatever each of them meets.
        return ranks.proves_again and (ranks.divides or not met)


@contextmanager
def _unseen(capture: CaptureContext, call: ModuleCall, state: ModuleState | None = None) -> Iterator[None]:
    """Within the block a model may be run freely: state, random numbers and caches are restored afterwards."""
    # `state`: what the model is put back to; None for what it is now.
    state = state or _state_of(capture, call)
    randomness = Randomness(_used(capture, call))
    try:
        with _torch.without_parametrization_cache(), uncounted():
            yield
    finally:
        state.restore()
        randomness.restore()
        # Weights that were cast for autocast here are of graphs that nobody sees.
        torch.clear_autocast_cache()


def _state_of(capture: CaptureContext, call: ModuleCall, *, outside: bool = True) -> ModuleState:
    """Return the state that a call of the model may write to, as it is now."""
    objects = [leaf for leaf in _tree.leaves(call.inputs) if not isinstance(leaf, Tensor)]
    return ModuleState(capture.model, arguments=objects, outside=outside)


def _copied_call(call: ModuleCall) -> ModuleCall:
    """Return a call whose tensors are copies."""
    return ModuleCall(call.module, *_copied(call.inputs))


def _copied(inputs: Any, *, of: Any = None) -> Any:
    """Return inputs whose tensors and arrays are copies, which a forward may change in place."""
    # `of`: the user's, where some are copies already.
    copies: dict[int, Any] = {}
    originals = None if of is None else {id(leaf) for leaf in _tree.leaves(of)}

    def copy(leaf: Any) -> Any:
        if originals is not None and id(leaf) not in originals:
            return leaf
        if id(leaf) not in copies and isinstance(leaf, Tensor):
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if leaf in SHARED:
                SHARED[copies[id(leaf)]] = None
        elif isinstance(leaf, np.ndarray):
            return leaf.copy()
        return copies.get(id(leaf), leaf)

    # Nobody who watches a forward sees them made.
    with _torch.overrides_off():
        return _tree.mapped(copy, inputs)


class _UsersError(Exception):
    """Wraps an exception of the user's code in a rehearsal."""


@dataclass(frozen=True)
class _ReadForward:
    """A forward with what was proved of its rows, to be run again on other inputs."""

    call: ModuleCall
    parts: list[Tensor]  # tensors of its output
    rows: Mapping[int, RowMap] | None  # how the rows of which of them map to samples; None where nothing was asked
    state: ModuleState | None  # what the model held before it
    shown: Callable[[CaptureContext, Any], list[Tensor]]  # returns the tensors that are looked at of an output
    own: frozenset[int] = frozenset()  # numbers of other tensors of its output, computed from parameters alone

    def without_graph(self) -> "_ReadForward":
        """Return the same without the graph behind the output."""
        return replace(self, parts=[part.detach().requires_grad_(part.requires_grad) for part in self.parts])

    def rerun(self, capture: CaptureContext) -> Run:
        """Return a function that runs the forward on other inputs, from the state that it began with."""

        def run(inputs: Any) -> list[Tensor]:
            _restore_state(self.state)
            parts = self.shown(capture, capture.run(self.call.module, *_copied(inputs, of=self.call.inputs)))
            return [part for number, part in enumerate(parts) if number not in self.own]

        return run


@dataclass(frozen=True)
class _Rehearsed:
    """Result of a rehearsal, to be stored on the outputs of the user's own run."""

    rows: Mapping[int, RowMap]  # how the rows of which of its output tensors map to samples
    padded: Sequence[Any]  # positions of which of them samples have only because others are longer

    def hand_on(self, parts: Sequence[Tensor], forward: ForwardContext) -> None:
        """Store the proved row maps and padded positions on the outputs' nodes."""
        mark_proved(
            [Start(GradientSource.of(parts[number]), rows) for number, rows in self.rows.items() if number < len(parts)]
        )
        forward.compared = bool(self.rows)
        trained = (one for one in self.padded if one.number < len(parts) and parts[one.number].grad_fn is not None)
        forward.padded = [replace(one, edge=edge_of(parts[one.number])) for one in trained]


def _restore_state(state: ModuleState | None) -> None:
    """Restore the modules' state at the beginning of the forward that is proved."""
    if state is not None:
        state.restore()


def _read_again(capture: CaptureContext, again: Callable[[], ModuleCall], state: ModuleState | None) -> Any:
    """Run a forward that was misread once more, from what modules held before it."""
    _restore_state(state)
    return capture.again(ModuleCall(*capture.bags.as_rows(*again())))


@contextmanager
def _turned(
    capture: CaptureContext, rows: Mapping[int, RowMap], states: Iterable[Any], error: SampleMixingError
) -> Iterator[None]:
    """Within the block read outputs with several rows per sample the other way round; raise the error if that fails."""
    # `error` is what reading them as usual led to; `states` of the call sites are those before it.
    sites, folded = capture.sites, any(row_map.kind in FOLDED for row_map in rows.values())
    if sites.turned or not folded or capture.gathering is not None:
        raise error
    sites.turned = True
    sites.restore(states)
    try:
        yield
    except GhostClipError:
        sites.turned = False
        raise error from None


def _parts_of(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output; of one that lies on several ranks, this rank's part."""
    return [_torch.part_of(tensor) for tensor in outputs_of(output)]


def _rows_of(probe: Probe | None, parts: Sequence[Tensor]) -> dict[int, RowMap]:
    """Return how the rows of outputs map to samples, by number, as a probe began with them."""
    maps = {} if probe is None else {id(start.edge.tensor): start.row_map for start in probe.begun}
    return {number: maps[id(part)] for number, part in enumerate(parts) if id(part) in maps}


def _sharing(capture: CaptureContext, what: str) -> AbstractContextManager[None]:
    """Return a context whose errors all ranks that share samples raise."""
    return nullcontext() if capture.gathering is None else capture.gathering.sharing(what)


def _used(capture: CaptureContext, call: ModuleCall) -> list[Tensor]:
    """Return the model's and the call's tensors: they lie on every device in use."""
    return [*capture.model.parameters(), *capture.model.buffers(), *_tree.tensors(call.inputs)]


def _as_taken(output: Tensor, axis: int, forward: ForwardContext, shown: RowMap | None) -> RowMap:
    """Return the row map by which the next part of a model reads an output."""
    if output.dim() > forward.batch_axis and output.shape[forward.batch_axis] == forward.batch_size:
        return RowMap("axis", forward.batch_axis)
    several = axis >= 0 and output.shape[axis] % forward.batch_size == 0
    return shown or (RowMap(FOLDED[0], axis) if several else WHOLE)


def _refuse_of_all_samples(model: nn.Module, outputs: Sequence[Tensor], rows: Mapping[int, RowMap]) -> None:
    """Refuse outputs without samples that the next part of a model would send a gradient of all samples for."""
    for number, output in enumerate(outputs):
        if output.requires_grad and number not in rows:
            raise UncoveredParameterError(_OF_ALL_SAMPLES.format(model=type(model).__name__, shape=tuple(output.shape)))


def _has_packed(inputs: Any) -> bool:
    """Return whether a packed sequence is among a model's inputs: its samples cannot be repeated or exchanged."""
    return next(iter(packed_inputs(inputs)), None) is not None


def _probe_outputs(capture: CaptureContext, outputs: list[Tensor], *, half: bool = False) -> Probe | None:
    """Probe by backwards from the outputs whether samples mix; return the first reading that holds, or the first."""
    # Each sample without each other, or the first `half` alone.
    # None where there was no output to start from. Outputs of which none has an axis that could hold the samples are
    # refused.
    forward, sites = capture.forward, capture.sites
    first: Probe | None = None
    states = sites.states()
    linear = is_linear([output for output in outputs if output.requires_grad], capture, forward)
    first_half = dict.fromkeys(range(forward.batch_size // 2), 1.0)
    weights = [first_half] if half else weightings(forward.batch_size, linear=linear)
    for begun in starts(outputs, forward=forward, known=sites.outputs):
        probe = Probe({}, capture.describe_module, linear, begun=begun)
        if first is not None:
            # Forget what a wrong reading of the outputs seemed to show.
            sites.restore(states)
        with capture.listening(probe):
            run_probe(
                probe,
                begun,
                batch_size=forward.batch_size,
                run=capture.run_backward,
                weights=weights,
                on_any=partial(on_any, capture.gathering),
            )
        if not probe.failed:
            return probe
        first = first or probe
    return first
