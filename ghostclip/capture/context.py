"""`CaptureContext`: what happens when a module is called, when an operation meets a parameter, when a gradient arrives.

The one file that knows all others of capture.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from ghostclip import _torch, _tree
from ghostclip.capture import backward_entry, hooks
from ghostclip.capture.blocks import Blocks
from ghostclip.capture.call_sites import CallSites, Resized
from ghostclip.capture.decide import DecisionCache, decide
from ghostclip.capture.forward import ForwardContext, Surroundings
from ghostclip.capture.inputs import Bags, RowTracker, as_flat, packed_inputs, with_dummy, without_dummy
from ghostclip.capture.nodes import accumulation_node, is_to_tie, tied, under_checkpoint
from ghostclip.capture.opaque_modules import OpaqueModules
from ghostclip.capture.param_use import Listener, ParamUse, differentiated_message
from ghostclip.capture.plans import ByRule
from ghostclip.capture.ranks import (
    Gathering,
    OnParts,
    awaited,
    is_divided,
    quieten_wrapper,
    refuse_divided_outputs,
    refuse_whole_data,
)
from ghostclip.capture.row_maps import ArgumentLayout, layout_of, refuse_other_order
from ghostclip.capture.substitution import Substitution, untouched_grads
from ghostclip.capture.tracked import (
    HOOKED,
    LOOKED_AT,
    Operation,
    TrackedTensor,
    asked_for_gradient,
    hooked,
    plain,
    sets_hook,
    tracked_leaves,
    without_samples,
)
from ghostclip.errors import GhostClipError, LossReductionError, UncoveredParameterError, UnsupportedModelError
from ghostclip.rules.registry import any_samplers, operation_name


class ModuleCall(NamedTuple):
    """A call of the outermost module, with its inputs."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword inputs."""
        return self.args, dict(self.kwargs)


class InputNotes(Protocol):
    """Whoever notes the inputs of forwards that take in samples."""

    on_batch: Callable[[Sequence[Tensor]], object] | None  # called as a batch is handed out, with its tensors
    on_end: Callable[[], object] | None  # called when whoever takes batches takes no more

    def note(self, tensors: Sequence[Tensor], rows: int) -> Any:
        """Return a note on the tensors that a forward takes in, with the number of its samples."""

    def hand_on(self, output: Tensor) -> None:
        """Note a tensor that a forward returns."""

    def drawn_with(self, tensor: Tensor) -> int:
        """Return how many records a batch has that a tensor is known to be of; 0 where it is of none."""

    def join(self, forwards: Sequence[Any]) -> Any:
        """Return a note on a backward from those on the forwards behind it."""


class Prover(Protocol):
    """Prover that forwards are read right."""

    records: bool  # whether what is done with a forward's outputs is recorded

    def begin(self, capture: "CaptureContext", call: ModuleCall, inputs: Sequence[Tensor]) -> None:
        """Look at a forward before it runs."""

    def end(self, capture: "CaptureContext", call: ModuleCall, output: Any) -> Any:
        """Weigh the evidence on a forward that has run, and return the output of its last reading."""

    def watching_backward(self, capture: "CaptureContext") -> AbstractContextManager[None]:
        """Return a context for a backward that trains, in which nothing may write state."""

    def record_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Note what is done with the outputs of a forward that was looked at."""

    def renew(self) -> None:
        """Ask for all evidence again, as the model was changed."""


class CaptureContext:
    """Attaches to a model, substitutes its parameters during forwards and delivers gradients to a listener."""

    def __init__(  # noqa: PLR0913 - who calls, who is told, and what is gathered by whom
        self,
        model: nn.Module,
        *,
        batch_first: bool,
        on_backward: Callable[[ParamUse | None], None],
        on_loss: Callable[[Sequence[Any], backward_entry.Grads, Sequence[ForwardContext]], float],
        prover: Prover | None = None,
        units: Sequence[nn.Module] = (),
        gathering: Gathering | None = None,
    ) -> None:
        # on_backward: called when a gradient arrives and nobody listens. on_loss: called before a plain backward
        # through forwards, with its roots, their gradients, and these. units: modules whose parameters exist only while
        # they run, see `ghostclip.capture.substitution`. gathering: the ranks that gather these parameters; its units
        # count among the units.
        self.model = model
        self.gathering = gathering
        units = [*units, *(() if gathering is None else gathering.units)]
        self.axis = 0 if batch_first else 1
        self.sites = CallSites()
        self._divided = gathering is not None and gathering.divides
        self.substitution = Substitution(model, self, units, divided=self._divided)
        self.bags = Bags(model)
        self.before_forward: Callable[[], None] = lambda: None  # called before a forward that trains
        self.note_inputs: InputNotes | None = None  # told of the inputs of forwards; None to tell nobody
        self._anchor = torch.zeros((), requires_grad=True)
        self._rows = RowTracker()
        self._around = Surroundings(
            self._anchor,
            self.sites,
            self._rows,
            self._deliver,
            self.describe_module,
            self.model.buffers,
            self.substitution.all_train,
        )
        self.forward = ForwardContext(self._around, 0, self.axis)
        self._on_backward, self._on_loss, self._prover = on_backward, on_loss, prover
        self._decisions, self._decided_for = DecisionCache(), 0
        self._blocks: Blocks | None = None
        self._opaque = OpaqueModules(self.substitution.unwatched)
        self._listener: Listener | None = None
        self._listening: ExitStack | None = None
        self._full_backward = False
        self._running: hooks.Running | None = None
        self._sites_before = 0
        self._unwatched = False
        self._stopped: list[Any] = []  # what the compiler goes on with after each outermost call that has begun
        self._watch = hooks.Watch()
        self._attach()
        for unit in units:
            self._watch.extend(hooks.attach_inside(unit, self._enter_unit, self.substitution.restore, self._leave_unit))
        backward_entry.attach(self)

    def _attach(self) -> None:
        """Put hooks on the modules that have none yet."""
        hooks.attach(self.model, self._enter, self._leave, self._watch)
        # A forward that is run once more gathers once more, which the other ranks would not expect.
        self._rows.always |= self.gathering is not None
        self._rows.always |= any(isinstance(module, nn.RNNBase) for module in self.model.modules())

    def close(self) -> None:
        """Leave the model as it was: break a running forward off, remove hooks, restore parameters and decisions."""
        self.stop_listening()
        self._break_off()
        self._watch.remove()
        backward_entry.detach(self)
        self.free_gathered()
        self.substitution.close()
        self._decisions.forget()

    @property
    def attached(self) -> bool:
        """Whether hooks are on the model."""
        return bool(self._watch)

    @property
    def watches(self) -> bool:
        """Whether forwards are watched, and not only written down."""
        return bool(self._watch) and not self._unwatched

    # -- forward ------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begin a module call; return inputs to run on instead of its own, None to use its own."""
        if self._unwatched or _torch.exports():
            return None
        # DDP must not average raw gradients.
        quieten_wrapper(self.model)
        if self._running is not None and self._running.was_broken_off(module):
            self._break_off()
        changed = None
        if self.substitution.enter():
            # An entry a call: the compiler that `_begin` stops and `_leave` lets go on.
            self._stopped.append(None)
            if torch.is_grad_enabled():
                changed = self._begin(ModuleCall(module, args, kwargs))
            elif not _torch.in_backward():
                # Nothing is captured; that it ran to its end is seen by the next call.
                self._running = hooks.Running(module)
        run_args, run_kwargs = changed or (args, kwargs)
        self._opaque.enter(module, run_args, run_kwargs, self.describe_module)
        return changed

    def _begin(self, call: ModuleCall) -> tuple[Any, Any] | None:
        """Begin the outermost call; an empty batch gets a dummy sample, inputs with a gradient lead to the anchor."""
        self._stopped[-1] = hooks.suspend_compiler()
        self._refuse_surroundings(call.module)
        if _torch.in_backward():
            # Activation checkpointing runs a part of the latest forward again.
            self._start(call.args, call.kwargs)
            return None
        self.stop_listening()
        if self.gathering is not None:
            self.gathering.free_gathered()
        self.before_forward()
        self.substitution.record_held()
        self.forward = forward = ForwardContext(self._around, 0, self.axis)
        size = self.bags.batch_size(call.args, call.kwargs, self.axis)
        if size == 0:
            inputs = _tree.mapped(lambda item: with_dummy(item, self.axis), (call.args, dict(call.kwargs)))
            call = ModuleCall(call.module, *inputs)
        forward.batch_size, forward.is_dummy = max(1, size), size == 0
        tensors = _tree.tensors((call.args, call.kwargs))
        if size and self.note_inputs is not None:
            forward.noted = self.note_inputs.note(tensors, size)
        if self._prover is not None:
            try:
                with nullcontext() if self.gathering is None else self.gathering.announcing_error():
                    self._prover.begin(self, call, tensors)
            except BaseException:
                self._break_off()
                self.doubt()
                raise
        if is_to_tie(self.model, tensors):
            call, tensors = self._tied(call)
            forward.is_tied = True
        self._watch.put_last(call.module)
        self._sites_before = len(self.sites.table)
        # Only the call's frames hold the token: once it is gone, the call is over, even one that an error ended.
        token = hooks.Token(call.kwargs)
        self._running = hooks.Running(call.module, token, self._break_off)
        self._start(call.args, call.kwargs, tensors=tensors)
        if not (any_samplers(self._watch.kinds) or self.substitution.units or _torch.several_ranks()):
            self._watch.inner_off(call.module)
        return call.args, token

    def _tied(self, call: ModuleCall) -> tuple[ModuleCall, list[Tensor]]:
        """Let inputs with a gradient lead to the anchor; return the call, and the tensors of its inputs."""
        size = self.bags.batch_size(call.args, call.kwargs, self.axis)
        inputs = _tree.mapped(lambda item: tied(item, self._anchor, size, self.axis), (call.args, dict(call.kwargs)))
        return ModuleCall(call.module, *inputs), _tree.tensors(inputs)

    def _refuse_surroundings(self, module: nn.Module) -> None:
        """Refuse a call inside a transform or a reentrant checkpoint's backward, and of a model divided since."""
        # Shards before proofs: they follow a rank's samples, and would gather on it alone.
        if self.gathering is None and not self.substitution.units and _torch.any_gathered(self.substitution.kinds()):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} was divided by fully_shard after the clipper was attached. Divide the "
                "model first, then build the optimizer from its parameters, then call make_private; a private model "
                "takes remove_hooks() before that, and make_private again on the same engine."
            )
        around = _torch.in_backward() and module is self.model and not under_checkpoint()
        if around or _torch.transform() is not None:
            self._break_off()
            raise UnsupportedModelError((_inside_a_checkpoint if around else _transformed)(module))

    def _start(self, *inputs: Any, tensors: Sequence[Tensor] | None = None) -> None:
        """Substitute the parameters and watch operations on them and on the data."""
        if self.substitution.substitute():
            self._adopt()
        self._forget_old_plans()
        forward, tensors = self.forward, _tree.tensors(inputs) if tensors is None else tensors
        if inputs:
            forward.inputs = frozenset(map(id, tensors))
        # A packed sequence is a tuple of tensors.
        packed = list(packed_inputs(inputs)) if len(tensors) > 1 else []
        watched = bool(packed) or forward.unproven or not inputs
        self._rows.begin(
            forward.batch_size,
            forward.batch_axis,
            tensors,
            dummy=forward.is_dummy,
            resized=forward.resized,
            watched=watched,
        )
        for sequence in packed:
            self._rows.admit(sequence)
        if inputs and self._blocks is not None:
            self._blocks.begin(forward, inputs)

    def _adopt(self) -> None:
        """Watch modules that came into the model, and ask for evidence as of a new one."""
        self._attach()
        self.forward.unproven = True
        self.doubt()

    def doubt(self) -> None:
        """Ask for all evidence again: the model was changed, or a part of it was refused."""
        self.sites.forget()
        self._decisions.forget()
        self._rows.renew()
        if self._prover is not None:
            self._prover.renew()

    @contextmanager
    def doubted_if_refused(self) -> Iterator[None]:
        """Yield during a check; a caller who catches its refusal and goes on is asked for evidence again."""
        try:
            yield
        except BaseException:
            self.doubt()
            raise

    def _forget_old_plans(self) -> None:
        if self._decided_for != self.substitution.generation:
            self._decided_for = self.substitution.generation
            self._decisions.forget()

    @property
    def calls_samplers(self) -> bool:
        """Whether modules have samplers of the user's, which take their calls over."""
        return any_samplers(self._watch.kinds)

    @property
    def watches_blocks(self) -> bool:
        """Whether repeated blocks are watched, as a memory budget below 1 asks for it."""
        return self._blocks is not None

    def watch_blocks(self, choose: Callable[[Any, Mapping[str, Any]], Mapping[str, bool]]) -> None:
        """Watch the model's repeated blocks from now on, and checkpoint those that ``choose`` of `Blocks` returns."""
        assert not self.substitution.units, "what is run again must have its parameters then"
        self._blocks = Blocks(self.model, self._anchor, choose)

    def _give_back(self) -> bool:
        """Count a module call off, with blocks and parameters restored where it was the outermost."""
        outermost = self.substitution.leave()
        if outermost and self._blocks is not None:
            self._blocks.end()
        return outermost

    def _enter_unit(self, unit: nn.Module) -> None:
        """Substitute the parameters of a unit of its own, which exist by now."""
        if self._rows.active:
            self.substitution.substitute_unit(unit)
            self._forget_old_plans()

    def _leave_unit(self, unit: nn.Module, output: Any) -> None:
        """Have a unit's parameters substituted once they were gathered for a backward that runs its forward again."""
        # A checkpoint inside of a unit's call does so without calling the unit, whose hooks do not run then.
        forward = self.forward
        if not (forward.runs_again and torch.is_grad_enabled()) or _torch.in_backward():
            return

        def gathered(grad: Tensor) -> Tensor:
            self._arrives(forward)
            self._enter_unit(unit)
            return grad

        for tensor in outputs_of(output):
            if tensor.grad_fn is not None:
                # After the hooks that gather, and after a layer's own, which may run the unit again.
                _torch.hear_gradient(tensor, gathered)

    def _break_off(self) -> None:
        """End a forward that was interrupted without any hook being called."""
        self._watch.inner_on()
        self.substitution.break_off()
        if self._blocks is not None:
            self._blocks.end()
        self._opaque.break_off()
        self._rows.end()
        while self._stopped:
            _torch.restart_compiler(self._stopped.pop())
        self._running = None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """End a module call; return what replaces its output, None to leave it."""
        if self._unwatched or _torch.exports():
            return None
        captured = self._opaque.leave(module, output, self.forward)
        left = None
        if self._give_back():
            self._watch.inner_on()
            self._rows.end()
            try:
                failed = output is None or not torch.is_grad_enabled()
                left = self._end(ModuleCall(module, args, kwargs), captured, failed=failed)
            finally:
                # The end of a call may run another: a graph between two parts of the model is followed back.
                if self._stopped:
                    _torch.restart_compiler(self._stopped.pop())
            if self._prover is not None and self._prover.records and not (failed or _torch.in_backward()):
                outputs = outputs_of(captured if left is None else left)
                self._prover.record_outputs([leaf for leaf in outputs if leaf.requires_grad])
        return captured if left is None and captured is not output else left

    def _end(self, call: ModuleCall, output: Any, *, failed: bool) -> Any:
        """End the outermost call, with all parameters restored, and weigh the evidence on what is new."""
        if _torch.in_backward():
            return None
        self._running = None
        if failed:
            if self.gathering is not None:
                self.gathering.announce_failure()
            return None
        read = output
        with self.doubted_if_refused(), nullcontext() if self.gathering is None else self.gathering.errors_shared():
            if self._divided:
                refuse_divided_outputs(self.model, outputs_of(output), axis=self.axis)
            if self._rows.missed:
                self.sites.forget_since(self._sites_before)
                read = self.again(call)
                self.forward.require_evidence_always()
            outputs = outputs_of(read)
            self._meet_end(outputs)
            result = read if self._prover is None else self._prover.end(self, call, read)
        forward = self.forward
        for leaf in outputs if result is read else outputs_of(result):
            forward.ends_on_mesh |= self._divided and _torch.is_sharded_tensor(leaf)
            if leaf.requires_grad:
                backward_entry.announce(self, forward, leaf, lambda: self._arrives(forward))
                if self.note_inputs is not None:
                    self.note_inputs.hand_on(leaf)
        if forward.is_dummy:
            return _tree.mapped(lambda item: without_dummy(item, self.axis), result)
        return None if result is output else result

    def _meet_end(self, outputs: Sequence[Tensor]) -> None:
        """Note how the latest forward got from its last use to its outputs; refuse an order of their own."""
        forward = self.forward
        if forward.batch_size > 1 and forward.latest is not None and not self._divided:
            refuse_other_order(self.model, outputs, forward)
            nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
            way = tuple([(_torch.order_of(node) - forward.latest, type(node)) for node in nodes])
            if way not in self.sites.ends:
                forward.require_evidence(self.sites.ends, way)

    def again(self, call: ModuleCall) -> Any:
        """Run the latest forward once more, as a new one of the same batch."""
        self._decisions.forget()
        return self._read(call)

    def _read(self, call: ModuleCall) -> Any:
        """Run a call with parameters substituted, as a new forward of the latest one's batch."""
        module, args, kwargs = as_flat(*call)
        self.forward = self.forward.anew()
        self.substitution.enter()
        try:
            self._start(args, kwargs)
            if module in self.substitution.units:
                return module(*args, **kwargs)
            self._opaque.enter(module, args, kwargs, self.describe_module)
            output = self._watch.call_inside(module, args, kwargs)
            return self._opaque.leave(module, output, self.forward)
        finally:
            self._give_back()
            self._rows.end()

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module without our hooks, but for those that gather its parameters."""
        if module in self.substitution.units:
            return module(*args, **kwargs)
        return self._watch.call_inside(module, args, kwargs)

    def rehearse(self, call: ModuleCall) -> Any:
        """Run the latest forward before the user does, on copies of the inputs, as one that is to be proved."""
        if is_to_tie(self.model, _tree.tensors((call.args, call.kwargs))):
            call, _ = self._tied(call)
        output = self._read(call)
        self._meet_end(outputs_of(output))
        return output

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Yield, while a call of the outermost module begins, as if none had begun."""
        self.substitution.leave()
        try:
            yield
        finally:
            self.substitution.enter()

    def free_gathered(self) -> None:
        """Free the parameters gathered for the proofs of a finished forward."""
        if self.gathering is not None:
            self.gathering.free_gathered()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Yield while forwards that run are none of the user's, and restore the latest one afterwards."""
        latest = self.forward
        try:
            yield
        finally:
            self.forward = latest

    @contextmanager
    def watching(self, *, on: bool) -> Iterator[None]:
        """Yield while forwards are watched, or run as without a clipper: no compiler takes these, traced elsewhere."""
        before, self._unwatched = self._unwatched, not on
        compiler = None if on else hooks.suspend_compiler()
        try:
            yield
        finally:
            self._unwatched = before
            _torch.restart_compiler(compiler)

    @contextmanager
    def substituted(self) -> Iterator[None]:
        """Yield with parameters substituted for a backward in which checkpointed functions run their forward again."""
        if not self.forward.runs_again:
            yield
            return
        self.substitution.enter()
        compiler = hooks.suspend_compiler()
        try:
            self._start()
            yield
        finally:
            self.substitution.leave()
            self._rows.end()
            _torch.restart_compiler(compiler)

    # -- operations ---------------------------------------------------------------------------------------------

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], first: TrackedTensor
    ) -> Any:
        """Decide on one operation on tracked tensors, then run it."""
        # ``first`` is the first tracked one among its arguments.
        if self._divided:
            with _torch.subclasses_off():
                return self._intercept_divided(func, args, kwargs)
        output = self._decisions.run((func, id(first)), args, kwargs, self.forward)
        if output is not None:
            return output
        with _torch.subclasses_off():
            return self._decide(func, args, kwargs, first)

    def _intercept_divided(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide on one operation on parameters that may be divided among ranks."""
        name = operation_name(func)
        if name in LOOKED_AT:
            return self._intercept_plain(func, args, kwargs)
        args, kwargs = awaited(args, kwargs)
        if is_divided(args, kwargs):
            return OnParts(func, name, args, kwargs, self.forward, self._intercept_plain).result()
        assert self.gathering is not None, "who divides"
        tracked = tracked_leaves((args, kwargs))
        if name in HOOKED and self.gathering.spread.issuperset(path for one in tracked for path in one.origin.names):
            # It would add up the ranks' parts of a gradient, which is done here sample by sample.
            return RemovableHandle(OrderedDict())
        self.forward.spread.update(dict.fromkeys(self.gathering.spread, True))
        if torch.is_grad_enabled():
            refuse_whole_data(name, args, kwargs, self.forward, self.gathering.brought_together)
        return self._intercept_plain(func, args, kwargs)

    def _intercept_plain(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide on one operation on plain tensors that stand for this rank's parts."""
        first = tracked_leaves((args, kwargs))[0]
        output = self._decisions.run((func, id(first)), args, kwargs, self.forward)
        return self._decide(func, args, kwargs, first) if output is None else output

    def _decide(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], first: TrackedTensor
    ) -> Any:
        """Decide on an operation that has no cached decision, and run it."""
        forward, name = self.forward, operation_name(func)
        if func is torch.autograd.grad:
            raise UncoveredParameterError(asked_for_gradient((args, kwargs)))
        # Reentrant checkpointing runs its forward without gradients first.
        without_grad = not torch.is_grad_enabled()
        if without_grad:
            forward.ran_without_grad = forward.runs_again = True
        if without_grad or name in LOOKED_AT:
            return func(*plain(args), **plain(kwargs))
        operation = Operation(func, name, args, kwargs)
        if any(tracked.origin.interceptor is not self for tracked in operation.tracked):
            message = f"{name}: parameters of two models with separate clippers meet. Use one clipper for both."
            raise UncoveredParameterError(message)
        if name == "backward":
            raise UncoveredParameterError(without_samples(args))
        if sets_hook(operation):
            raise UnsupportedModelError(hooked(operation))
        layout = layout_of(operation, forward) if operation.plain else ArgumentLayout(None)
        plan, orders = decide(operation, layout, forward)
        for order in orders:
            order.record_in(forward)
        if not isinstance(plan, ByRule):
            return plan.run(forward)
        use = plan.use_in(forward)
        self._decisions.store((func, id(first)), operation, plan, use)
        return plan.carry_out(use)

    # -- backward -----------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Yield while a listener receives the gradients of uses; only one may."""
        if self._listener is not None:
            raise GhostClipError("a backward of this model is running already.")
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def start_listening(self, listener: Listener) -> None:
        """Let a listener receive the gradients of a backward that is running, until `stop_listening`."""
        self._listening = ExitStack()
        self._listening.enter_context(self.listening(listener))
        self._listening.enter_context(self.substituted())

    def stop_listening(self) -> None:
        """End what `start_listening` began, if anything."""
        if self._listening is not None:
            listening, self._listening = self._listening, None
            listening.close()

    def _deliver(self, use: ParamUse, grad: Tensor) -> None:
        """Hand the gradient of a use's output to the listener, opening a pass if there is none."""
        if torch.is_grad_enabled():
            raise UnsupportedModelError(differentiated_message(use.site, self.describe_module(use.site.names[0])))
        if self._listener is None:
            if not self._trains():
                return
            backward_entry.refuse_unseen(use.forward)
            self._on_backward(use)
        assert self._listener is not None
        self._listener.receive(use, grad)

    def _arrives(self, forward: ForwardContext) -> None:
        """Note that a backward has reached an output of a forward."""
        if self._listener is None and self._trains():
            backward_entry.refuse_unseen(forward)
            self._on_backward(None)

    def examine(self, roots: Sequence[Any], grads: backward_entry.Grads, forwards: Sequence[ForwardContext]) -> float:
        """Have the loss of a backward examined before it runs; return what that is to begin with."""
        # Whoever listens already has examined it.
        if self._listener is not None or not self.is_trainable():
            return 1.0
        forwards = self._go_back(self._latest_first(forwards))
        with self.doubted_if_refused():
            return self._on_loss(roots, grads, forwards)

    def forwards_behind(self, loss: Tensor) -> list[ForwardContext]:
        """Return the forwards that a loss was computed from, the latest of all first unless it has no part in it."""
        if backward_entry.waits_alone(self.forward):
            return [self.forward]
        return self._latest_first(backward_entry.forwards_behind(self, loss))

    def go_back(self, loss: Tensor) -> list[ForwardContext]:
        """Return the forwards that a loss was computed from, the first with what was noted of the others."""
        forwards = self._go_back(self.forwards_behind(loss))
        if not self.forward.batch_size:
            raise LossReductionError(
                f"the loss was computed from no output of this private model: is it another's? "
                f"{_inside_a_checkpoint(self.model)}"
            )
        return forwards

    def _latest_first(self, forwards: Sequence[ForwardContext]) -> list[ForwardContext]:
        latest = self.forward if self.forward in forwards or not forwards else forwards[0]
        return [latest, *(forward for forward in forwards if forward is not latest)]

    def _go_back(self, forwards: list[ForwardContext]) -> list[ForwardContext]:
        self.forward, *others = forwards
        for other in others:
            self.forward.merge(other)
        return forwards

    def watching_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward that trains, in which nothing may write state."""
        return nullcontext() if self._prover is None else self._prover.watching_backward(self)

    def _trains(self) -> bool:
        """Return whether the backward that runs is for the parameters, not for inputs alone."""
        # Reentrant checkpointing hides the anchor from the outer graph, and accepts no backward for inputs alone.
        # Proofs run single nodes outside any.
        if not _torch.in_backward():
            return False
        hidden = self.forward.ran_without_grad and _torch.is_full_backward()
        return hidden or _torch.will_run(accumulation_node(self._anchor))

    def run_backward(
        self, outputs: Sequence[Tensor] | Sequence[GradientEdge], grads: Sequence[Tensor | None]
    ) -> bool | None:
        """Run a backward through captured operations only, keeping the graph and every ``.grad`` outside."""
        # Returns whether the operations are the forward's own (reentrant checkpointing makes new ones); None when the
        # backward broke off because it met reentrant checkpointing unawares: call again, with a new listener.
        with self.substituted(), _counted_as_before(self.forward), self.watching_backward():
            # What ran without gradients may be a reentrant checkpoint, and below it nothing that is trained: a backward
            # restricted to captured operations would pass it over and say nothing.
            if not (self._full_backward or self.sites.reentrant or self.forward.ran_without_grad):
                try:
                    with backward_entry.unseen():
                        torch.autograd.backward(outputs, grads, retain_graph=True, inputs=self._ends())
                    return True
                except RuntimeError as error:
                    # Reentrant checkpointing accepts no ``inputs``.
                    if "use_reentrant=True" not in str(error):
                        raise
                    self._full_backward = True
                    return None
            with untouched_grads(outputs), backward_entry.unseen():
                torch.autograd.backward(outputs, grads, retain_graph=True)
            return False

    def _ends(self) -> list[Tensor]:
        """Return where a backward restricted to captured operations ends; a parameter may have been frozen since."""
        return [self._anchor, *(p for p in self.substitution.present.values() if p.requires_grad)]

    # -- what can be asked --------------------------------------------------------------------------------------

    def is_trainable(self) -> bool:
        """Return whether a backward would train any parameter that was substituted."""
        return any(parameter.requires_grad for parameter in self.substitution.parameters.values())

    def is_checkpointed(self) -> bool:
        """Return whether activation checkpointing (of either kind) was active in the latest forward."""
        return self.forward.checkpointed or (self.forward.ran_without_grad and self.sites.reentrant)

    def describe_module(self, name: str) -> str:
        """Return ``path (Type)`` of the module that owns a parameter."""
        path = name.rpartition(".")[0]
        try:
            return f"{path or 'model'} ({type(self.model.get_submodule(path)).__name__})"
        except AttributeError:
            return path


def _inside_a_checkpoint(module: nn.Module) -> str:
    return (
        f"A reentrant checkpoint around {type(module).__name__} computes its outputs without a graph, and runs the "
        "forward that belongs to the loss within the backward, where nothing follows it. Give checkpoint(..., "
        "use_reentrant=False), or checkpoint blocks inside the model."
    )


def _transformed(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} runs inside a transform of torch.func (grad, vmap, jacrev), where nothing can be "
        "followed to the parameters. Call the model itself on the batch; gradients of samples are what is clipped here "
        "anyway. For a look at it use a copy: copy.deepcopy(model)."
    )


@contextmanager
def _counted_as_before(forward: ForwardContext) -> Iterator[None]:
    """Restore the counts of operations that run again, so that each backward finds the same call sites."""
    visits = dict(forward.visits)
    try:
        yield
    finally:
        forward.visits.clear()
        forward.visits.update(visits)


INTO_OBJECTS = 2
"""How deep tensors are looked for in outputs that are no containers."""


def outputs_of(output: Any) -> list[Tensor]:
    """Return the untracked tensors of a model's output in order, each once; of other objects by their attributes."""
    tensors = _tree.tensors(output, into_objects=INTO_OBJECTS)
    return [tensor for tensor in tensors if not isinstance(tensor, TrackedTensor)]


def tracked_among(output: Any) -> frozenset[int]:
    """Return the numbers of an output's tensors that are computed from parameters alone."""
    tensors = _tree.tensors(output, into_objects=INTO_OBJECTS)
    return frozenset([number for number, tensor in enumerate(tensors) if isinstance(tensor, TrackedTensor)])


def has_rows_of_samples(output: Any, resized: Resized | None) -> bool:
    """Return whether an output that is computed from parameters alone, as it was read, has rows of samples."""
    # A parameter that was repeated for each sample has the same row for all of them.
    tensors = _tree.tensors(output, into_objects=INTO_OBJECTS)
    if resized is None or len(resized.outputs) != len(tensors):
        return False
    pairs = zip(tensors, resized.outputs, strict=True)
    return any(isinstance(tensor, TrackedTensor) and _has_other_rows(plain(tensor), shape) for tensor, shape in pairs)


def _has_other_rows(value: Tensor, resized: tuple[int, ...]) -> bool:
    """Return whether a value grows with the batch along an axis, where its entries differ."""
    sizes = zip(value.shape, resized, strict=False)
    grown = next((axis for axis, (size, other) in enumerate(sizes) if size != other), None)
    return grown is not None and bool((value != value.narrow(grown, 0, 1)).any())
