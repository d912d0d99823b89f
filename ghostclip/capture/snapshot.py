"""A model's modules and parameters as a forward found them, for the next one to find out that nothing has changed.

Modules and parameters may be exchanged between any two forwards, so that each looks at all of them. Looking whether
they are the same objects as before costs a third of looking them up.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from torch import nn

from ghostclip import _torch


class _Found(NamedTuple):
    """What all modules of a model held: lists of all, so that looking again costs a few comparisons of lists."""

    kinds: list[type]
    # Numbers (``id``) of objects that the snapshot holds, so that they are none other's as long as it does.
    tables: list[int]
    sizes: list[int]
    names: list[str]
    held: list[int]


def _found(modules: Sequence[nn.Module]) -> _Found:
    tables = _torch.parameter_and_child_tables(modules)
    return _Found(
        list(map(type, modules)),
        list(map(id, tables)),
        list(map(len, tables)),
        list(chain.from_iterable(tables)),
        list(map(id, chain.from_iterable(map(dict.values, tables)))),
    )


class Snapshot:
    """What was found at the beginning of a forward, before anything was put in the place of a parameter.

    Attributes:
        modules: The modules.
        recurrent: The recurrent layers among them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Note what modules hold.

        Args:
            modules: All modules of a model.
        """
        self._trained: list[nn.Parameter] = []
        self._memories: list[list[Any]] = []
        self.modules = list(modules)
        self._norms = [module for module in self.modules if isinstance(module, _torch.AnyBatchNorm)]
        self.recurrent = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._found = _found(self.modules)
        self._tables = _torch.parameter_and_child_tables(self.modules)
        self._held: list[Any] = [item for table in self._tables for item in table.values()]
        held = [item for item in self._held if isinstance(item, nn.Parameter)]
        self._frozen = [parameter for parameter in held if not parameter.requires_grad]

    def note_trained(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note which parameters are trained, and their memory.

        Args:
            parameters: They.
        """
        self._trained, self._memories = list(parameters), _torch.memories_of(parameters)

    def holds(self) -> bool:
        """Return whether modules, parameters, their memory and what is trained of them are as they were.

        Returns:
            False also where a batch norm is in training mode.
        """
        if _found(self.modules) != self._found:
            return False
        if not all(map(_is_trained, self._trained)) or _torch.memories_of(self._trained) != self._memories:
            return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))


_is_trained: Final[Callable[[nn.Parameter], bool]] = attrgetter("requires_grad")


def _is_training(module: nn.Module) -> bool:
    return module.training
