"""A model's modules and parameters as a forward found them, for the next one to find out that nothing has changed.

Modules and parameters may be exchanged between any two forwards, so that each looks at all of them. Looking whether they
are the same objects as before costs a third of looking them up.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn

from ghostclip import _torch


# A module, what its table of children holds, the names in its table of parameters, and the identities of these.
_Entry: TypeAlias = tuple[nn.Module, list[tuple[str, nn.Module | None]], list[str], list[int]]


class Snapshot:
    """What was found at the beginning of a forward, before anything was put in the place of a parameter.

    Attributes:
        recurrent: The recurrent layers among the modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Note what modules hold.

        Args:
            modules: All modules of a model.
        """
        self._entries: list[_Entry] = []
        self._trainable: list[tuple[nn.Parameter, tuple[Any, ...]]] = []
        self._frozen: list[nn.Parameter] = []
        self._norms: list[nn.Module] = []
        self.recurrent: list[nn.RNNBase] = []
        for module in modules:
            self._note(module)

    def _note(self, module: nn.Module) -> None:
        table: dict[str, Any] = _torch.parameter_table(module)
        # Identities are those of objects that are held below, and none other's as long as they are.
        identities = list(map(id, table.values()))
        self._entries.append((module, list(_torch.child_table(module).items()), list(table), identities))
        for parameter in table.values():
            if parameter is not None and parameter.requires_grad:
                self._trainable.append((parameter, _torch.memory_of(parameter)))
            elif parameter is not None:
                self._frozen.append(parameter)
        if isinstance(module, _torch.AnyBatchNorm):
            self._norms.append(module)
        if isinstance(module, nn.RNNBase):
            self.recurrent.append(module)

    def holds(self) -> bool:
        """Return whether modules, parameters, their memory and what is trained of them are as they were.

        Returns:
            False also where a batch norm is in training mode.
        """
        for module, children, names, identities in self._entries:
            table: dict[str, Any] = _torch.parameter_table(module)
            if (table or names) and (list(map(id, table.values())) != identities or list(table) != names):
                return False
            below = _torch.child_table(module)
            if (below or children) and list(below.items()) != children:
                return False
        for parameter, memory in self._trainable:
            if not parameter.requires_grad or _torch.memory_of(parameter) != memory:
                return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _is_training(module: nn.Module) -> bool:
    return module.training
