"""A model's modules and parameters as a forward found them, for the next one to find out that nothing has changed.

Modules and parameters may be exchanged between any two forwards, so that each looks at all of them. Looking whether they
are the same objects as before costs a third of looking them up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ghostclip import _torch


@dataclass(frozen=True, eq=False)
class _Entry:
    """One module, with what its tables of children and of parameters hold."""

    module: nn.Module
    children: list[tuple[str, nn.Module | None]]
    names: list[str]
    parameters: list[nn.Parameter | None]
    identities: list[int]


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
        held = list(table.values())
        # Identities are those of objects that are held here, and none other's as long as they are.
        self._entries.append(
            _Entry(module, list(_torch.child_table(module).items()), list(table), held, list(map(id, held)))
        )
        for parameter in held:
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
        for entry in self._entries:
            table: dict[str, Any] = _torch.parameter_table(entry.module)
            if list(map(id, table.values())) != entry.identities or list(table) != entry.names:
                return False
            if list(_torch.child_table(entry.module).items()) != entry.children:
                return False
        for parameter, memory in self._trainable:
            if not parameter.requires_grad or _torch.memory_of(parameter) != memory:
                return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _is_training(module: nn.Module) -> bool:
    return module.training
