"""A model's modules and parameters as a forward found them, for the next one to find out that nothing has changed.

Modules and parameters may be exchanged between any two forwards, so that each looks at all of them. Looking whether
they are the same objects as before costs a third of looking them up.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final

from torch import Tensor, nn

from ghostclip import _torch


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
        held = [item for item in self._held if isinstance(item, nn.Parameter)]
        self._frozen = [parameter for parameter in held if not parameter.requires_grad]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Let a copy of the model be inspected anew."""

    def note_trained(self, parameters: Sequence[nn.Parameter], aliases: Sequence[Tensor]) -> None:
        """Note which parameters are trained, with an alias that keeps each one's memory alive."""
        self._trained = list(parameters)
        self._plain = [parameter for parameter in parameters if type(parameter) is nn.Parameter]
        self._aliases = [alias for p, alias in zip(parameters, aliases, strict=True) if type(p) is nn.Parameter]
        self._places = _places_of(self._plain)
        self._others = [(p, _torch.memory_of(p)) for p in parameters if type(p) is not nn.Parameter]

    def holds(self) -> bool:
        """Return whether modules, parameters, their memory and what is trained of them are as they were."""
        # False also where a batch norm is in training mode.
        if not (self._holds_modules() and all(map(_is_trained, self._trained)) and self._holds_memory()):
            return False
        return not any(map(_is_trained, self._frozen)) and not any(map(_is_training, self._norms))

    def _holds_modules(self) -> bool:
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

    def _holds_memory(self) -> bool:
        """Return whether parameters lie where their aliases do, of the same sizes and dtypes."""
        # Both are alive, so that one address is one memory, also where content was exchanged meanwhile.
        places = _places_of(self._plain)
        return (
            places == self._places
            and _addresses_of(self._aliases) == places[0]
            and all(_torch.memory_of(parameter) == memory for parameter, memory in self._others)
        )


_is_trained: Final[Callable[[nn.Parameter], bool]] = attrgetter("requires_grad")


def _is_training(module: nn.Module) -> bool:
    return module.training


# What tells, with an address, where the elements of a plain tensor lie; no function of ours stands in between, as all
# parameters are asked in every forward.
_FORMS: Final[Sequence[Callable[[Tensor], Any]]] = (attrgetter("dtype"), attrgetter("shape"), Tensor.stride)


def _addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _places_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return addresses, types, shapes and strides of tensors, in a list each."""
    return [_addresses_of(tensors), *(list(map(form, tensors)) for form in _FORMS)]
