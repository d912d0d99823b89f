"""A model's modules and parameters as they were: when it was attached to, and as the latest forward found them.

Modules and parameters may be added, exchanged, unfrozen or tied anew at any time (adapters, another head, a resized
embedding). Forwards clip whatever the model has; an optimizer holds what it was built with, which the *roster* is
compared with. Each forward looks at all of them: a *snapshot* tells whether they are the same objects as in the forward
before, which costs a third of looking them up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn

from ghostclip import _torch

_is_trained: Final[Callable[[nn.Parameter], bool]] = attrgetter("requires_grad")
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
        self._model = model
        # An identity may be given anew when its object is gone.
        self._known: dict[int, tuple[str, ref[nn.Parameter]]] = {}
        self._trainable: set[int] = set()
        self._met: list[int] = []
        self._strangers: dict[int, tuple[str, nn.Parameter]] = {}
        self.accept()

    def accept(self) -> None:
        """Accept the model's present parameters as those that it should have."""
        named = list(self._model.named_parameters())
        before = {id(p) for _, p in named if self._was_trainable(p)}
        self.changed = False  # whether a forward has met others than those; until `accept`
        self._strangers.clear()
        self._known = {id(p): (name, ref(p)) for name, p in named}
        self._trainable = before | {id(p) for _, p in named if p.requires_grad}

    def meet(self, met: list[int], named: Mapping[str, nn.Parameter] = MappingProxyType({})) -> bool:
        """Note the trainable parameters of a forward; return whether they differ from those of the forward before."""
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
        known = self._known.get(id(parameter))
        return known is not None and known[1]() is parameter

    def _was_trainable(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._trainable and self._knows(parameter)

    def _name(self, parameter: nn.Parameter) -> str:
        return self._known[id(parameter)][0] if self._knows(parameter) else f"one of shape {tuple(parameter.shape)}"


def _trains(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


class Snapshot:
    """A model's modules and parameters at the beginning of a forward, before any substitution."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._trained: list[nn.Parameter] = []
        self._plain: list[nn.Parameter] = []
        self._aliases: list[Tensor] = []
        self._places: list[list[Any]] = []
        self._others: list[tuple[nn.Parameter, tuple[Any, ...]]] = []
        self.modules = list(modules)
        self._norms = [module for module in self.modules if isinstance(module, _torch.AnyBatchNorm)]
        # the recurrent layers among them
        self.recurrent = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._kinds = list(map(type, self.modules))
        self._attributes = list(map(vars, self.modules))
        self._tables = _torch.parameter_and_child_tables(self._attributes)
        self._empty = [table for table in self._tables if not table]
        self._full = list(filter(None, self._tables))
        self._sizes = list(map(len, self._full))
        self._names = list(chain.from_iterable(self._full))
        # Views, which follow their tables.
        self._views = [table.values() for table in self._full]
        self._held: list[Any] = list(chain.from_iterable(self._views))
        parameters = [item for item in self._held if isinstance(item, nn.Parameter)]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Let a copy of the model be inspected anew."""

    def note_trained(self, parameters: Sequence[nn.Parameter], aliases: Sequence[Tensor]) -> None:
        """Note which parameters are trained, with an alias that keeps each one's memory alive."""
        self._trained = list(parameters)
        self._plain = [parameter for parameter in parameters if type(parameter) is nn.Parameter]
        self._aliases = [alias for p, alias in zip(parameters, aliases, strict=True) if type(p) is nn.Parameter]
        self._places = _layouts_of(self._plain)
        self._others = [(p, _torch.memory_of(p)) for p in parameters if type(p) is not nn.Parameter]

    def matches(self) -> bool:
        """Return whether modules, parameters, their memory and what is trained of them are as they were."""
        # False also where a batch norm is in training mode.
        if not (self._same_modules() and all(map(_is_trained, self._trained)) and self._same_memory()):
            return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))

    def _same_modules(self) -> bool:
        """Return whether modules are of the same classes and have the same objects under the same names."""
        return (
            list(map(type, self.modules)) == self._kinds
            and all(map(is_, _torch.parameter_and_child_tables(self._attributes), self._tables))
            and not any(self._empty)
            and list(map(len, self._full)) == self._sizes
            and list(chain.from_iterable(self._full)) == self._names
            # By identity: parameters that are compared make a tensor.
            and all(map(is_, chain.from_iterable(self._views), self._held))
        )

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
