"""A model's modules and parameters as a forward found them, for the next one to find out that nothing has changed.

Modules and parameters may be exchanged between any two forwards, so that each looks at all of them. Looking whether
they are the same objects as before costs a third of looking them up.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ghostclip import _torch


class _Entry(NamedTuple):
    """One module, and what its tables held."""

    module: nn.Module
    kind: type
    children: list[tuple[str, nn.Module | None]]
    table: dict[str, Any]
    names: list[str]
    # Of objects that the snapshot holds, so that they are none other's as long as it does.
    identities: list[int]


class Snapshot:
    """What was found at the beginning of a forward, before anything was put in the place of a parameter.

    Attributes:
        memory: The trainable parameters with what `_torch.memory_of` says of each; for whoever looks at it to set.
        recurrent: The recurrent layers among the modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Note what modules hold.

        Args:
            modules: All modules of a model.
        """
        self.memory: list[tuple[nn.Parameter, tuple[Any, ...]]] = []
        self.recurrent: list[nn.RNNBase] = []
        self._entries: list[_Entry] = []
        self._held: list[nn.Parameter] = []
        self._norms: list[nn.Module] = []
        for module in modules:
            table: dict[str, Any] = _torch.parameter_table(module)
            children, held = list(_torch.child_table(module).items()), list(table.values())
            self._entries.append(_Entry(module, type(module), children, table, list(table), list(map(id, held))))
            self._held += [parameter for parameter in held if parameter is not None]
            if isinstance(module, _torch.AnyBatchNorm):
                self._norms.append(module)
            if isinstance(module, nn.RNNBase):
                self.recurrent.append(module)
        self._frozen = [parameter for parameter in self._held if not parameter.requires_grad]

    def holds(self) -> bool:
        """Return whether modules, parameters, their memory and what is trained of them are as they were.

        Returns:
            False also where a batch norm is in training mode.
        """
        for module, kind, children, table, names, identities in self._entries:
            if type(module) is not kind or _torch.parameter_table(module) is not table:
                return False
            if (table or names) and (list(map(id, table.values())) != identities or list(table) != names):
                return False
            below = _torch.child_table(module)
            if (below or children) and list(below.items()) != children:
                return False
        for parameter, memory in self.memory:
            if not parameter.requires_grad or _torch.memory_of(parameter) != memory:
                return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _is_training(module: nn.Module) -> bool:
    return module.training
