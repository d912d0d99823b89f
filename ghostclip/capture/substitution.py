"""Parameter substitution: tracked tensors in the place of a model's parameters for the time of a forward.

A *unit* of substitution is a module whose parameters, and those of the modules below it that belong to no other unit,
are substituted and given back together. The model is one unit, substituted as its outermost call begins. Modules whose
parameters exist only while they run (sharded ones, gathered before their forward and freed after it) are units of their
own, substituted after whatever gathers and given back before whatever frees.

Modules and parameters may be added, exchanged, unfrozen or tied anew at any time (adapters, another head, a resized
embedding). Forwards clip whatever the model has; an optimizer holds what it was built with, which the *roster* is
compared with. Each forward looks at all of them: a *snapshot* tells whether they are the same objects as in the forward
before, which costs a third of looking them up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from ghostclip import _torch
from ghostclip.capture.nodes import Edge, edge_of, nodes_behind
from ghostclip.capture.tracked import Interceptor, TrackedTensor, tracked_parameter
from ghostclip.errors import SampleMixingError, UncoveredParameterError, UnsupportedModelError

_is_training: Final[Callable[[nn.Module], bool]] = attrgetter("training")
# What tells where the elements of a plain tensor lie; no function of ours stands in between, as all parameters are
# asked in every forward.
_FORMS: Final[Sequence[Callable[[Tensor], Any]]] = (
    Tensor.data_ptr, attrgetter("dtype"), attrgetter("shape"), Tensor.stride
)  # fmt: skip


@dataclass(frozen=True)
class Changes:
    """Differences between a model's parameters and an optimizer's."""

    missing: list[str]  # names of those that are trainable now, were not before, and that the optimizer does not hold
    gone: list[str]  # names of those that the optimizer has and the model has no longer
    joined: list[str]  # names of those that are trainable now, were not before, and that the optimizer holds
    added: list[str]  # names of the joined ones that the model did not have before
    passed: list[str]  # names under which a forward met others than the model had before or has now


class Roster:
    """A model's parameters as they were, by identity."""

    def __init__(self, model: nn.Module) -> None:
        """Record the model's present parameters."""
        self._model = model
        # An identity may be given anew when its object is gone.
        self._known: dict[int, tuple[str, ref[nn.Parameter]]] = {}
        self._trainable: set[int] = set()  # identities of those that were trainable
        self._met: list[int] = []  # identities of the latest forward's
        self._strangers: dict[int, tuple[str, nn.Parameter]] = {}  # that a forward had and the roster has not
        self.accept()

    def accept(self) -> None:
        """Accept the model's present parameters as those that it should have."""
        named = list(self._model.named_parameters())
        before = {id(p) for _, p in named if self._was_trainable(p)}
        self.changed = False  # whether a forward has met others than those; until `accept`
        self._strangers.clear()
        self._known = {id(p): (name, ref(p)) for name, p in named}
        self._trainable = before | {id(p) for _, p in named if p.requires_grad}

    def compare_forward(self, met: list[int], named: Mapping[str, nn.Parameter]) -> bool:
        """Compare a forward's trainable parameters with those of the forward before; return whether they differ."""
        # `met`: identities, in the order of the modules, a shared one once for each place.
        if met == self._met:
            return False
        self._met = met
        expected = {key for key, (_, reference) in self._known.items() if _trains(reference())}
        differs = not expected <= set(met) <= self._trainable
        self.changed = self.changed or differs
        if differs:
            self._strangers |= {id(p): (name, p) for name, p in named.items() if id(p) in met and not self._knows(p)}
        return differs

    def compare(self, optimized: Iterable[nn.Parameter]) -> Changes:
        """Compare the model's parameters with those that an optimizer has."""
        of_model = {id(p): (name, p) for name, p in self._model.named_parameters()}
        of_optimizer = {id(p): p for p in optimized if p.requires_grad}
        new = {key: name for key, (name, p) in of_model.items() if p.requires_grad and not self._was_trainable(p)}
        joined = [key for key in new if key in of_optimizer]
        return Changes(
            missing=[name for key, name in new.items() if key not in of_optimizer],
            gone=[self._name(p) for key, p in of_optimizer.items() if key not in of_model],
            joined=[new[key] for key in joined],
            added=[new[key] for key in joined if not self._knows(of_optimizer[key])],
            passed=[name for key, (name, _) in self._strangers.items() if key not in of_model],
        )

    def _knows(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is one that was accepted."""
        known = self._known.get(id(parameter))
        return known is not None and known[1]() is parameter

    def _was_trainable(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was trainable when it was accepted."""
        return id(parameter) in self._trainable and self._knows(parameter)

    def _name(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter, or its shape where it is none of the model's."""
        return self._known[id(parameter)][0] if self._knows(parameter) else f"one of shape {tuple(parameter.shape)}"


def _trains(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


class Snapshot:
    """A model's modules and parameters before a forward; while they `match`, it need not be walked again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Record modules, their tables and which parameters are frozen."""
        self._trained: list[nn.Parameter] = []  # parameters that train
        self._plain: list[nn.Parameter] = []  # those of torch's own class
        self._aliases: list[Tensor] = []  # on the memory of each plain one
        self._places: list[list[Any]] = []  # `_layouts_of` the plain ones
        self._others: list[tuple[nn.Parameter, tuple[Any, ...]]] = []  # of other classes, with their memory
        self.modules = list(modules)
        self._norms = [module for module in self.modules if isinstance(module, _torch.AnyBatchNorm)]
        # the recurrent layers among them
        self.recurrent = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._attributes = list(map(vars, self.modules))
        self._tables = _torch.parameter_and_child_tables(self._attributes)
        self._held: list[Any] = list(chain.from_iterable(map(dict.values, self._tables)))  # parameters and children
        self._inventory = self._now()
        parameters = [item for item in self._held if isinstance(item, nn.Parameter)]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Let a copy of the model be inspected anew."""

    def store_trained(self, parameters: Sequence[nn.Parameter], aliases: Sequence[Tensor]) -> None:
        """Record which parameters are trained, with an alias that keeps each one's memory alive."""
        self._trained = list(parameters)
        self._plain = [parameter for parameter in parameters if type(parameter) is nn.Parameter]
        self._aliases = [alias for p, alias in zip(parameters, aliases, strict=True) if type(p) is nn.Parameter]
        self._places = _layouts_of(self._plain)
        self._others = [(p, _torch.memory_of(p)) for p in parameters if type(p) is not nn.Parameter]

    def matches(self) -> bool:
        """Return whether modules, parameters, their memory and what is trained of them are as they were."""
        # False also where a batch norm is in training mode.
        if not (self._now() == self._inventory and all(map(_is_trained, self._trained)) and self._same_memory()):
            return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))

    def _now(self) -> list[list[Any]]:
        """Return classes of modules, their tables, and the names and objects in these: objects by their numbers."""
        # Parameters that are compared make a tensor. What was recorded is alive, so that a number is one object's.
        tables = _torch.parameter_and_child_tables(self._attributes)
        held = chain.from_iterable(map(dict.values, tables))
        names = chain.from_iterable(tables)
        numbers = list(map(id, tables)), list(map(id, held))
        return [list(map(type, self.modules)), *numbers, list(map(len, tables)), list(names)]

    def _same_memory(self) -> bool:
        """Return whether parameters lie where their aliases do, of the same sizes and dtypes."""
        # Both are alive, so that one address is one memory, also where content was exchanged meanwhile.
        layouts = _layouts_of(self._plain)
        return (
            layouts == self._places
            and list(map(Tensor.data_ptr, self._aliases)) == layouts[0]
            and all(_torch.memory_of(parameter) == memory for parameter, memory in self._others)
        )


def _layouts_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return addresses, types, shapes and strides of tensors, in a list each."""
    return [list(map(form, tensors)) for form in _FORMS]


# The table of a module, a key in it, the parameter that it holds there, and what stands for it in a forward.
_Place: TypeAlias = tuple[dict[str, Any], str, nn.Parameter, TrackedTensor]
_is_trained: Final = attrgetter("requires_grad")
_COMPILED: Final = (
    "the loss goes through a function that torch.compile has compiled so that its backward can run once alone, as it "
    "gives the memory of what it saved away: whether it takes samples together cannot be looked at. Compile the model "
    "alone, or set torch._functorch.config.donated_buffer = False before the function is called for the first time."
)


@dataclass(eq=False)
class _Unit:
    """State to restore of one unit."""

    parameters: list[_Place] = field(default_factory=list)  # what was replaced in tables
    flat: list[tuple[nn.RNNBase, list[Any]]] = field(default_factory=list)  # weight lists of recurrent layers

    def restore(self) -> None:
        """Put the parameters back into their tables, and the weight lists into recurrent layers."""
        for table, key, parameter, tracked in self.parameters:
            # What frees a unit's parameters may have been there first, with what the module holds from then on.
            if table.get(key) is tracked:
                table[key] = parameter
        for module, weights in self.flat:
            _torch.set_flat_weights(module, weights)


class Substitution:
    """The parameters that are substituted at the moment, and guards on all of them."""

    def __init__(
        self, model: nn.Module, interceptor: Interceptor, units: Sequence[nn.Module] = (), *, divided: bool = False
    ) -> None:
        """Guard every trainable parameter; substitute nothing yet."""
        # units: modules whose parameters exist only while they run. divided: ranks compute with parts of parameters, of
        # which this rank's are tracked.
        self._divided = divided
        # every parameter substituted so far, by name, as an optimizer has it
        self.parameters: dict[str, nn.Parameter] = {}
        # the same as the model computes with them: what a unit has gathered in the place of its parts
        self.present: dict[str, nn.Parameter] = {}
        self.units = frozenset(units)  # modules that are units of their own; the model itself may be among them
        self.generation = 0  # number of tracked tensors made so far; another number voids plans for older ones
        self._model, self._interceptor = model, interceptor
        self._depth = 0  # of nested module calls
        self._substituted: dict[nn.Module, _Unit] = {}  # what to restore, by unit or model
        # By identity of the parameter: its tracked tensor, and the memory that this is on.
        self._tracked: dict[int, tuple[TrackedTensor, tuple[Any, ...]]] = {}
        self._guards: dict[int, RemovableHandle] = {}  # by identity of the parameter
        # What units gather, by identity, with the parameter that an optimizer holds in its place.
        self._gathered: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._held: dict[str, nn.Parameter] = {}  # the parts that units hold between forwards, by name
        # What the forward before has found, and what it has put in place.
        self._snapshot: Snapshot | None = None
        self._last_substituted: list[_Place] = []
        self.record_held()
        self.roster = Roster(model)  # compares the trainable parameters with those that were accepted
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._guard(name, parameter)

    # -- calls of modules -----------------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Count a module call that begins and return whether it is the outermost."""
        self._depth += 1
        return self._depth == 1

    def leave(self) -> bool:
        """Count the end of a module call; at the outermost one restore all parameters and return True."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return False
        for module in list(self._substituted):
            self.restore(module)
        return True

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Yield while module calls are taken for inner ones, which begin and end nothing."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def copied(self) -> Iterator[dict[str, Tensor]]:
        """Substitute leaves on the same memory for the trainable parameters, and yield them by first name."""
        # Operations on them are nobody's uses, and gradients that they gain are theirs: no hook on a parameter is
        # called.
        copies: dict[int, tuple[str, Tensor]] = {}
        entries: list[tuple[dict[str, Any], str, Any]] = []
        modules = _modules_of(self._model, self.units)
        for prefix, module, _ in modules:
            table: dict[str, Any] = _torch.parameter_table(module)
            for key, stands in table.items():
                parameter = (
                    stands.origin.leaves[prefix + key].parameter if isinstance(stands, TrackedTensor) else stands
                )
                if parameter is not None and parameter.requires_grad:
                    entries.append((table, key, stands))
                    copy = parameter.detach().requires_grad_()
                    table[key] = copies.setdefault(id(parameter), (prefix + key, copy))[1]
        recurrent = [
            (module, _torch.flat_weights(module)) for _, module, _ in modules if isinstance(module, nn.RNNBase)
        ]
        for module, _ in recurrent:
            parameters: dict[str, Any] = _torch.parameter_table(module)
            _torch.set_flat_weights(module, [parameters.get(name) for name in _torch.flat_weight_names(module)])
        try:
            yield dict(copies.values())
        finally:
            for table, key, stands in entries:
                table[key] = stands
            for module, weights in recurrent:
                _torch.set_flat_weights(module, weights)

    def break_off(self) -> None:
        """Restore all parameters, however deep the calls are."""
        self._depth = 1
        self.leave()

    # -- units ----------------------------------------------------------------------------------------------------

    def substitute(self) -> bool:
        """Substitute the trainable parameters outside of `units`; refuse a batch norm in training mode."""
        # Returns whether parameters have come in, become trainable, gone or changed places since the forward before.
        substituted, elsewhere = self._substituted.setdefault(self._model, _Unit()), list[int]()
        known = self._snapshot
        if known is not None and not substituted.parameters and known.matches():
            self._substitute_again(substituted, known)
            # What the roster has met the last time.
            return False
        modules = _modules_of(self._model, self.units)
        self._snapshot = None
        snapshot = None if self.units or substituted.parameters else Snapshot([module for _, module, _ in modules])
        moved = snapshot is not None and self._forget_moved(modules)
        for prefix, module, unit in modules:
            if unit is None:
                self._substitute_in(substituted, prefix, module)
            else:
                table: dict[str, Any] = _torch.parameter_table(module)
                elsewhere += [
                    id(self._held.get(prefix + key, p)) for key, p in table.items() if p is not None and p.requires_grad
                ]
            if isinstance(module, _torch.AnyBatchNorm) and module.training:
                raise SampleMixingError(
                    f"{prefix[:-1] or 'model'} ({type(module).__name__}): in training mode every sample's output "
                    "depends on the whole batch, so that per-sample gradients do not exist. Replace it by GroupNorm, "
                    "or put the layer in eval mode."
                )
        if snapshot is not None:
            snapshot.store_trained(
                [parameter for _, _, parameter, _ in substituted.parameters],
                [tracked.origin.value for _, _, _, tracked in substituted.parameters],
            )
            self._snapshot, self._last_substituted = snapshot, list(substituted.parameters)
        met = [*(id(parameter) for _, _, parameter, _ in substituted.parameters), *elsewhere]
        return self.roster.compare_forward(met, self.parameters) or moved

    def _forget_moved(self, modules: list[tuple[str, nn.Module, nn.Module | None]]) -> bool:
        """Forget the tracked tensors whose parameter is gone from under its name; return whether any was."""
        # Another may be there, and what is known by the name would be of two.
        stands = {
            prefix + key: parameter
            for prefix, module, _ in modules
            for key, parameter in _torch.parameter_table(module).items()
        }
        remaining = {
            number: entry
            for number, entry in self._tracked.items()
            if all(stands.get(name) is leaf.parameter for name, leaf in entry[0].origin.leaves.items())
        }
        if len(remaining) == len(self._tracked):
            return False
        self._tracked, self.generation = remaining, self.generation + 1
        for name in [name for name in self.present if name not in stands]:
            del self.present[name]
            self.parameters.pop(name, None)
        return True

    def _substitute_again(self, substituted: _Unit, known: Snapshot) -> None:
        """Substitute the same tracked tensors as in the forward before."""
        substituted.parameters = list(self._last_substituted)
        for table, key, _, tracked in substituted.parameters:
            table[key] = tracked
        for module in known.recurrent:
            _set_weight_lists(substituted, module)

    def all_train(self) -> bool:
        """Return whether every parameter that was ever substituted is trained at the moment."""
        return all(map(_is_trained, self.present.values()))

    def kinds(self) -> set[type]:
        """Return the classes of the modules, from the snapshot of the forward before if there is one."""
        known = self._snapshot
        return set(map(type, self._model.modules() if known is None else known.modules))

    def record_held(self) -> None:
        """Record the parameters that the units hold before a forward gathers others in their place."""
        # A unit that still has what it gathered for another forward, one without gradients say, has what it had.
        for prefix, module, unit in _modules_of(self._model, self.units) if self.units else ():
            if unit is not None and _torch.has_shards(unit):
                table: dict[str, Any] = _torch.parameter_table(module)
                self._held.update({prefix + key: p for key, p in table.items() if p is not None})

    def substitute_unit(self, module: nn.Module) -> None:
        """Substitute the trainable parameters of one of `units`, which exist by now."""
        substituted = self._substituted.setdefault(module, _Unit())
        for prefix, part, unit in _modules_of(self._model, self.units):
            if unit is module:
                self._substitute_in(substituted, prefix, part)

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that an optimizer has for one that a module has at the moment."""
        known = self._gathered.get(id(parameter))
        return parameter if known is None else known[1]

    def restore(self, module: nn.Module) -> None:
        """Restore the parameters of a unit or of the model."""
        unit = self._substituted.pop(module, None)
        if unit is not None:
            unit.restore()

    def _substitute_in(self, unit: _Unit, prefix: str, module: nn.Module) -> None:
        """Substitute tracked tensors for a module's own trainable parameters."""
        parameters: dict[str, Any] = _torch.parameter_table(module)
        for key, parameter in parameters.items():
            if parameter is None or isinstance(parameter, TrackedTensor) or not parameter.requires_grad:
                continue
            if not isinstance(parameter, nn.Parameter):
                raise UncoveredParameterError(
                    f"parameter '{prefix + key}': a tensor that is no parameter stands in its place while the model "
                    "runs (torch.func.functional_call, or an entry of module._parameters that was exchanged), and what "
                    "is learned would not reach the parameter that the optimizer holds. Call the model itself. Weights "
                    "that are computed from the parameters: "
                    "torch.nn.utils.parametrize.register_parametrization(module, name, ...), before make_private."
                )
            original = self._held.get(prefix + key, parameter)
            if original is not parameter:
                self._gathered[id(parameter)] = parameter, original
            tracked = self._tracked_for(prefix + key, parameter)
            unit.parameters.append((parameters, key, parameter, tracked))
            parameters[key] = tracked
        if isinstance(module, nn.RNNBase):
            _set_weight_lists(unit, module)

    def _tracked_for(self, name: str, parameter: nn.Parameter) -> TrackedTensor:
        """Return the tracked tensor, made anew when the parameter's storage was exchanged (``.data = ...``)."""
        cached = self._tracked.get(id(parameter))
        memory = _torch.memory_of(_torch.local(parameter) if self._divided else parameter)
        if cached is not None and cached[1] == memory:
            # Another parameter may have stood at its place meanwhile.
            self._stands(name, parameter)
            return cached[0]
        if parameter.is_complex():
            raise UnsupportedModelError(
                f"parameter '{name}' is complex, and norms and noise are those of real numbers. Hold its real view "
                "(nn.Parameter(torch.view_as_real(w))) and take torch.view_as_complex of it in the forward."
            )
        if _torch.is_sharded_tensor(parameter) and not self._divided:
            raise UnsupportedModelError(
                f"parameter '{name}' is held in parts (DTensor), and was not when the clipper was attached. Divide the "
                "model first (fully_shard), then build the optimizer from its parameters, then call make_private."
            )
        self._guard(name, parameter)
        self._stands(name, parameter)
        self.generation += 1
        tracked = tracked_parameter(name, parameter, self._interceptor)
        # It holds the parameter, whose number is its own as long as it lives.
        self._tracked[id(parameter)] = tracked, memory
        return tracked

    def _stands(self, name: str, parameter: nn.Parameter) -> None:
        """Record a parameter under its name: as an optimizer has it, and as the model computes with it."""
        self.parameters[name], self.present[name] = self.registered(parameter), parameter

    def _guard(self, name: str, parameter: nn.Parameter) -> None:
        """Make any gradient that reaches the parameter past the engine an error."""
        if id(parameter) in self._guards:
            return
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedModelError(
                f"parameter '{name}' has no shape yet (a lazy module). Call the model once with a batch, then build "
                "the optimizer."
            )

        def refuse(grad: Tensor) -> None:
            raise UncoveredParameterError(
                f"parameter '{name}' received a gradient that was not clipped per sample: it was used outside the "
                "forward of its modules (a method called directly, or a penalty built from parameters). Call the "
                "module itself. A penalty on parameters has no samples: use the optimizer's weight_decay, add its "
                "gradient to the released one in a hook (optimizer.register_step_pre_hook), or change the parameters "
                "after step()."
            )

        self._guards[id(parameter)] = parameter.register_hook(refuse)

    def close(self) -> None:
        """Restore every parameter and remove the guards."""
        self.break_off()
        for handle in self._guards.values():
            handle.remove()
        self._guards.clear()
        self._tracked.clear()
        self._snapshot = None
        self._last_substituted.clear()


def _modules_of(model: nn.Module, units: frozenset[nn.Module]) -> list[tuple[str, nn.Module, nn.Module | None]]:
    """Return every module once with its path and a dot, and its unit: ``named_modules`` at a third of its cost."""
    visited: dict[nn.Module, tuple[str, nn.Module | None]] = {}

    def visit(prefix: str, module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if module in units else unit
        visited[module] = prefix, unit
        for name, child in _torch.child_table(module).items():
            if child is not None and child not in visited:
                visit(f"{prefix}{name}.", child, unit)

    visit("", model, None)
    return [(prefix, module, unit) for module, (prefix, unit) in visited.items()]


def _set_weight_lists(unit: _Unit, module: nn.RNNBase) -> None:
    """Set the list of weights of a recurrent layer to those of its table."""
    if any(isinstance(weight, TrackedTensor) for weight in _torch.flat_weights(module)):
        return
    unit.flat.append((module, _torch.flat_weights(module)))
    table: dict[str, Any] = _torch.parameter_table(module)
    _torch.set_flat_weights(module, [table.get(name) for name in _torch.flat_weight_names(module)])


@contextmanager
def untouched_grads(outputs: Sequence[Tensor] | Sequence[GradientEdge]) -> Iterator[None]:
    """Restore the ``.grad`` of every leaf in the graph of ``outputs`` afterwards."""
    saved = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in _leaves(outputs)]
    try:
        yield
    finally:
        for leaf, grad, copy in saved:
            if grad is not None and copy is not None:
                grad.copy_(copy)
            leaf.grad = grad


def gradients_at(roots: Sequence[Any], grads: Sequence[Tensor | None], edges: Sequence[Edge]) -> list[Tensor | None]:
    """Return the gradients that a backward from ``roots`` brings to edges of a graph, which is kept; None for none."""
    ends: list[Any] = [GradientEdge(*edge) for edge in edges]
    try:
        return list(torch.autograd.grad(roots, ends, list(grads), retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "donated" in str(error):
            raise UnsupportedModelError(_COMPILED) from error
        if "use_reentrant=True" not in str(error):
            raise
    # Reentrant checkpointing accepts a full backward only.
    arrived: dict[Any, tuple[Any, ...]] = {}
    nodes = {edge[0] for edge in edges}
    handles = [node.register_prehook(partial(arrived.__setitem__, node)) for node in nodes]
    try:
        with untouched_grads(roots):
            torch.autograd.backward(roots, grads, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return [arrived[node][number] if node in arrived else None for node, number in edges]


def gradients_of_leaves(root: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients that a backward from ``root`` brings to leaves that have none yet; the graph is kept."""
    try:
        return list(torch.autograd.grad(root, list(leaves), retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
    try:
        with untouched_grads([root]):
            torch.autograd.backward(root, retain_graph=True)
            return [leaf.grad for leaf in leaves]
    finally:
        for leaf in leaves:
            leaf.grad = None


def _leaves(outputs: Sequence[Tensor] | Sequence[GradientEdge]) -> list[Tensor]:
    """Return the leaves in the graph of some outputs."""
    with torch.no_grad():
        nodes = nodes_behind(edge_of(output)[0] for output in outputs)
        return [leaf for leaf in map(_torch.leaf_of, nodes) if leaf is not None]
