"""A session: the hooks on one model, and what they lend, see and deliver."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ghostclip import _torch
from ghostclip.capture import backward_entry, eager, loan, readings
from ghostclip.capture.bags import Bags, as_flat
from ghostclip.capture.buffers import Buffers
from ghostclip.capture.consume import consume
from ghostclip.capture.decompose import decompose
from ghostclip.capture.derive import derive, reorders_copies
from ghostclip.capture.evidence import is_to_prove
from ghostclip.capture.growth import Grown, grown
from ghostclip.capture.inputs import emptied, in_backward, padded, under_checkpoint
from ghostclip.capture.leaves import leaves_of
from ghostclip.capture.nodes import accumulation_node, is_to_tie, tied
from ghostclip.capture.operation import LOOKED_AT, Operation
from ghostclip.capture.packed import packed_inputs
from ghostclip.capture.reorder import Watch
from ghostclip.capture.running import Running
from ghostclip.capture.settled import Settled
from ghostclip.capture.sites import Reading, Sites
from ghostclip.capture.tracked import plain, without_samples
from ghostclip.capture.unchecked import Unchecked
from ghostclip.capture.units import Units
from ghostclip.capture.usage import MAX_ATTEMPTS, Listener, Record, Use, differentiated
from ghostclip.capture.written import refuse_data, write
from ghostclip.errors import UncoveredParameterError, UnsupportedModelError
from ghostclip.rules.registry import operation_name


class Session:
    """Attaches to a model, lends its parameters out during forwards and delivers gradients to a listener.

    Attributes:
        record: The latest forward.
        sites: What is remembered of every call site.
        listener: Who receives gradients during a backward; set by the engine.
        parameters: Every parameter lent so far, by name.
        probes: Whether forwards are asked for evidence.
        unchecked: What could not be asked.
        note_inputs: Called with the tensors and the number of samples that a forward takes in; None to call nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_first: bool,
        on_backward: Callable[[Use | None], None],
        on_loss: backward_entry.OnLoss,
    ) -> None:
        """Attach to a model.

        Args:
            model: The model; nothing but hooks is added to it.
            batch_first: Whether the batch axis is axis 0 (else 1).
            on_backward: Called when a gradient arrives and no listener is set.
            on_loss: Called before a plain backward runs through forwards: with its roots, their gradients, and these.
        """
        self.model = model
        self.axis = 0 if batch_first else 1
        self.record = Record(batch_size=0, axis=self.axis)
        self.sites = Sites(self)
        self.listener: Listener | None = None
        self.on_backward = on_backward
        self.on_loss = on_loss
        self.anchor = torch.zeros((), requires_grad=True)
        self.parameters: dict[str, nn.Parameter] = {}
        self.probes = True
        self.unchecked = Unchecked()
        self.note_inputs: Callable[[Sequence[Tensor], int], Any] | None = None
        self.watch = Watch()
        self.settled = Settled(self)
        self.loan = loan.Loan(model, self)
        self.units = Units(self, self.loan)
        self._reentrant = self._full_backward = False
        self._bags = Bags(model)
        self._running: Running | None = None
        self._compiler: Any = None
        self._open: ExitStack | None = None
        self._handles: list[RemovableHandle] = []
        self.attach()
        backward_entry.attach(self)

    def attach(self) -> None:
        """Put hooks on the modules that have none yet."""
        self._handles += loan.attach(self.model, self, attached=bool(self._handles))

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        backward_entry.detach(self)
        self.loan.close()
        self.settled.forget()

    @property
    def attached(self) -> bool:
        """Whether hooks are on the model."""
        return bool(self._handles)

    # -- forward ------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begin a module call: the outermost one opens a record and lends the parameters.

        Args:
            module: The module.
            args: Its positional inputs.
            kwargs: Its keyword inputs.

        Returns:
            Inputs to run on in their place (an empty batch padded, those with a gradient tied in); None to keep them.
        """
        if self._running is not None and self._running.was_broken_off(module):
            self._break_off()
        if not self.loan.begin() or not torch.is_grad_enabled():
            return None
        self._compiler = eager.suspend()
        changed = None
        if not in_backward():
            self.discard_listener()
            self.record = Record(batch_size=0, axis=self.axis)
            size = self._bags.batch_size(args, kwargs, self.axis)
            if size == 0:
                args, kwargs = _torch.tree_map(lambda item: padded(item, self.axis), (args, dict(kwargs)))
                size = 1
                self.record.padded = True
            elif self.note_inputs is not None:
                tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
                self.record.noted = self.note_inputs(tensors, size)
            self.record.batch_size = size
            self.record.unproven = self.unchecked.begin(size, probes=self.probes)
            self.record.buffers = Buffers(self.model) if is_to_prove(self) else None
            if is_to_tie(self.model, leaves_of((args, kwargs))):
                args, kwargs = _torch.tree_map(lambda item: tied(item, self.anchor), (args, dict(kwargs)))
            if is_to_prove(self) and not self.sites.layouts:
                try:
                    self.record.grown = self.grown(module, args, kwargs)
                except BaseException:
                    self._break_off()
                    raise
            self._running = Running(module, kwargs, self._break_off)
            changed = args, self._running.hand_over()
        self._start(args, kwargs)
        return changed

    def _start(self, *inputs: Any) -> None:
        """Lend the parameters out and watch what is done with them and with the data."""
        self.loan.lend_all()
        tensors = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
        record = self.record
        self.watch.begin(record.batch_size, record.axis, tensors, made_up=record.padded, grown=record.grown)
        if not inputs:
            return
        self.record.inputs = frozenset(map(id, tensors))
        if len(self.record.inputs) > 1:
            for packed in packed_inputs(inputs):  # A packed sequence is a tuple of tensors.
                self.watch.admit(packed)

    def _let_compile(self) -> None:
        eager.resume(self._compiler)
        self._compiler = None

    def _break_off(self) -> None:
        """End a forward that was interrupted without any hook being called."""
        self.loan.take_back()
        self.units.clear()
        self.watch.end()
        self._let_compile()
        self._running = None

    def leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, failed: bool
    ) -> Any:
        """End a module call: the outermost one takes the parameters back and weighs the evidence on what is new.

        Args:
            module: The module.
            args: The positional inputs it ran on.
            kwargs: The keyword inputs it ran on.
            output: What it returned.
            failed: Whether it raised.

        Returns:
            The output to hand on (of a forward read anew, or without the made-up sample); None to keep it.
        """
        if not self.loan.end():
            return None
        self.watch.end()
        try:
            return self._ended(module, args, kwargs, output, failed=failed or not torch.is_grad_enabled())
        finally:
            self._let_compile()

    def _ended(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, failed: bool
    ) -> Any:
        if in_backward():
            return None
        if self._running is not None:
            self._running.end()
            self._running = None
        if failed:
            return None
        result = readings.proven(self, *self._bags.as_rows(module, args, kwargs), output)
        for leaf in readings.tensors(result):
            if leaf.requires_grad:
                backward_entry.announce(self, leaf)
        if self.record.padded:
            return _torch.tree_map(lambda item: emptied(item, self.axis), result)
        return None if result is output else result

    def again(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the latest forward once more, as a new record of the same batch.

        Args:
            module: The outermost module.
            args: Its positional inputs.
            kwargs: Its keyword inputs.

        Returns:
            Its output.
        """
        self.settled.forget()
        module, args, kwargs = as_flat(module, args, kwargs)
        record = self.record
        self.record = Record(
            record.batch_size, record.axis, padded=record.padded, grown=record.grown, noted=record.noted
        )
        self.loan.begin()
        try:
            self._start(args, kwargs)
            self.units.begin(module, args, kwargs)
            output = module.forward(*args, **kwargs)
            return self.units.end(module, output)
        finally:
            self.loan.end()
            self.watch.end()

    def grown(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Grown | None:
        """Run a forward that is proved with one sample more.

        Args:
            module: The outermost module.
            args: Its positional inputs.
            kwargs: Its keyword inputs.

        Returns:
            What it did; None where it cannot.
        """
        inputs: Any = (args, dict(kwargs))
        if next(iter(packed_inputs(inputs)), None) is not None:
            return None
        on_rows, *inputs = self._bags.as_rows(module, *inputs)

        def run(given: Any) -> list[Tensor]:
            own, args, kwargs = as_flat(on_rows, *given)
            return readings.tensors(own.forward(*args, **kwargs))

        size, axis = self.record.batch_size, self.record.axis
        with self.loan.unwatched():
            found = grown(self.model, run, tuple(inputs), batch_size=size, axis=axis)
        self.record.stays_small = found is None
        return found

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Yield with parameters lent for a backward, in which checkpointed functions run their forward again."""
        if not self.record.runs_again:
            yield
            return
        self.loan.begin()
        compiler = eager.suspend()
        try:
            self._start()
            yield
        finally:
            self.loan.end()
            self.watch.end()
            eager.resume(compiler)

    def open_listener(self, listener: Listener) -> Callable[[], None]:
        """Listen to a backward that somebody else runs.

        Args:
            listener: Who receives its gradients.

        Returns:
            To be called when the backward ends. If it never ends (an exception), the next forward cleans up.
        """
        self.listener = listener
        self._open = ExitStack()
        self._open.enter_context(self.lending())
        return self.discard_listener

    def discard_listener(self) -> None:
        """Stop listening to a backward that ended or was broken off by an exception."""
        if self._open is not None:
            self.listener = None
            self._open.close()
            self._open = None

    # -- operations ---------------------------------------------------------------------------------------------

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation on tracked tensors: derived, consumed, or merely looked at.

        Args:
            func: The torch function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            What the function returns; tracked where it is derived.

        Raises:
            UncoveredParameterError: Some were lent by another session, or a backward starts where no data came in.
        """
        done = self.settled.run(func, args, kwargs)
        if done is not NotImplemented:
            return done
        name = operation_name(func)
        # Reentrant checkpointing runs its forward without gradients first.
        silent = not torch.is_grad_enabled()
        self.record.silent |= silent
        if silent or name in LOOKED_AT:
            return func(*plain(args), **plain(kwargs))
        operation = Operation(func, name, args, kwargs)
        if any(tracked.origin.interceptor is not self for tracked in operation.tracked):
            message = f"{name}: parameters of two models with separate clippers meet. Use one clipper for both."
            raise UncoveredParameterError(message)
        if name == "backward":
            raise UncoveredParameterError(without_samples(args))
        reading = self.sites.read(operation) if operation.plain else Reading(None)
        data = [tensor for tensor in operation.plain if self.sites.is_data(tensor, reading, name)]
        if not data or reorders_copies(operation, self.record.batch_size):
            in_place = operation.is_in_place
            return write(operation, self.model.buffers()) if in_place else derive(func, name, args, kwargs)
        refuse_data(operation)
        decomposed = decompose(func, name, self)
        if decomposed is not None:
            return decomposed(*args, **kwargs)
        return consume(self, operation, reading)

    def register(self, use: Use) -> None:
        """Note a new use of the current forward."""
        if not in_backward():
            # What checkpointing runs again in a backward is no further use: counting it would keep its factors waiting.
            for tracked in use.targets.values():
                for name in tracked.origin.leaves:
                    self.record.use_counts[name] += 1
            self.record.note_size(use)
        self.record.checkpointed = self.record.checkpointed or under_checkpoint()
        # The other kind recomputes under hooks of its own, and what it registers then is dropped.
        self._reentrant = self._reentrant or (in_backward() and not under_checkpoint())
        self.record.unproven = self.record.unproven or use.site.attempts < MAX_ATTEMPTS

    def is_checkpointed(self) -> bool:
        """Return whether activation checkpointing (of either kind) was active in the latest forward."""
        return self.record.checkpointed or (self.record.silent and self._reentrant)

    def deliver(self, use: Use, grad: Tensor) -> None:
        """Hand the gradient of a use's output to the listener, opening a pass if there is none.

        Args:
            use: The use.
            grad: Shape and dtype of the output.

        Raises:
            UnsupportedModelError: The gradient itself is to be differentiated.
        """
        if torch.is_grad_enabled():
            raise UnsupportedModelError(differentiated(use.site, self.describe_module(use.site.names[0])))
        if self.listener is None:
            if not self.trains():
                return
            backward_entry.refuse_unseen(use.record)
            self.on_backward(use)
        assert self.listener is not None
        self.listener.receive(use, grad)

    def trains(self) -> bool:
        """Return whether the backward that runs is for the parameters, not for inputs alone."""
        # Reentrant checkpointing hides the anchor from the outer graph, and accepts no backward for inputs alone.
        return self.record.silent or _torch.will_run(accumulation_node(self.anchor))

    def run_backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool | None:
        """Run a backward through captured operations only, keeping the graph and every ``.grad`` outside.

        Args:
            outputs: Where it starts.
            grads: Their gradients.

        Returns:
            Whether the operations are the forward's own (reentrant checkpointing makes new ones); None when the
            backward broke off because it met reentrant checkpointing unawares: call again, with a new listener.
        """
        with self.lending():
            if not (self._full_backward or self._reentrant):
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
            with loan.untouched_grads(outputs), backward_entry.unseen():
                torch.autograd.backward(outputs, grads, retain_graph=True)
            return False

    def is_trainable(self) -> bool:
        """Return whether a backward would train any parameter that was lent."""
        return any(parameter.requires_grad for parameter in self.parameters.values())

    def _ends(self) -> list[Tensor]:
        """Return where a backward restricted to captured operations ends; a parameter may have been frozen since."""
        return [self.anchor, *(parameter for parameter in self.parameters.values() if parameter.requires_grad)]

    def describe_module(self, name: str) -> str:
        """Return ``path (Type)`` of the module that owns a parameter."""
        path = name.rpartition(".")[0]
        try:
            return f"{path or 'model'} ({type(self.model.get_submodule(path)).__name__})"
        except AttributeError:
            return path
