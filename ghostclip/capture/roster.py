"""The parameters that a model had when it was attached to, and whether forwards have met others since.

Modules and parameters may be added, exchanged, unfrozen or tied anew at any time (adapters, another head, a resized
embedding). Forwards clip whatever the model has; an optimizer holds what it was built with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from weakref import ref

from torch import nn


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
        expected = {key for key, (_, own) in self._known.items() if _trains(own())}
        differs = not expected <= set(met) <= self._trainable
        self.changed = self.changed or differs
        if differs:
            self._strangers |= {id(p): (name, p) for name, p in named.items() if id(p) in met and not self._knows(p)}
        return differs

    def compare(self, held: Iterable[nn.Parameter]) -> Changes:
        """Compare the model's parameters with those that an optimizer has."""
        own = {id(p): (name, p) for name, p in self._model.named_parameters()}
        of_optimizer = {id(p): p for p in held if p.requires_grad}
        new = {key: name for key, (name, p) in own.items() if p.requires_grad and not self._was_trainable(p)}
        joined = [key for key in new if key in of_optimizer]
        return Changes(
            missing=[name for key, name in new.items() if key not in of_optimizer],
            gone=[self._name(p) for key, p in of_optimizer.items() if key not in own],
            joined=[new[key] for key in joined],
            added=[new[key] for key in joined if not self._knows(of_optimizer[key])],
            passed=[name for key, (name, _) in self._strangers.items() if key not in own],
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
