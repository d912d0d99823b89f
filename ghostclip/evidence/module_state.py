"""What a forward can write beside parameters: buffers, counters and caches of modules, and what lies outside of them.

A forward that is asked about runs more than once. Each of these runs must begin with what the user's own began with,
or a model that does something else in every fifth call would do it in another one; and afterwards the model must be as
the user's own forward left it, whose loss may use what it finds there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.hooks import is_own
from ghostclip.evidence.reachable import Reachable

# What every module has: tables, which are looked after elsewhere, and its mode.
_OWN: Final = frozenset(vars(nn.Module()))


class ModuleState:
    """The buffers and attributes of a model's modules at one moment, and what their code reaches outside of them."""

    def __init__(self, model: nn.Module, *, arguments: Iterable[Any] = (), outside: bool = True) -> None:
        """Keep them.

        Args:
            model: The model.
            arguments: Objects that its forward is called with; tensors are kept by whoever hands out copies of them.
            outside: Whether what lies outside the modules counts.
        """
        self._model, self._hooks = model, _hooks_of(model)
        modules = list(model.modules())
        self._tables = [(table, dict(table)) for table in map(_torch.buffer_table, modules)]
        self._attributes = [(own, _attributes_of(own)) for own in map(vars, modules)]
        values = [value for _, kept in self._attributes for value in kept.values()]
        held = filter(_is_data, values)
        self._tensors = [(one, one.detach().clone(), _torch.version(one)) for one in (*model.buffers(), *held)]
        looked_after = [*modules, *model.parameters(), *(one for one, _, _ in self._tensors)]
        self._held = Reachable(values, known=looked_after)
        hooks = [hook for module in modules for hook in _torch.hooks_of(module) if not is_own(hook)] if outside else []
        kinds = dict.fromkeys(map(type, modules)) if outside else ()
        self._outside = Reachable([*kinds, *hooks], arguments=arguments, known=[*looked_after, *values])

    def restore(self) -> None:
        """Put everything back, in place where it was changed in place."""
        for buffers, before in self._tables:
            # One that is assigned anew is another object; one that was made since would not be made again.
            for name in buffers.keys() - before.keys():
                del buffers[name]
            buffers.update(before)
        # Whoever sets hooks in a first forward notes in an attribute that they are set, and would set them again.
        if _hooks_of(self._model) == self._hooks:
            for own, before in self._attributes:
                for name in _attributes_of(own).keys() - before.keys():
                    del own[name]
                own.update(before)
        self._held.restore()
        self._outside.restore()
        with torch.no_grad():
            for tensor, value, version in self._tensors:
                # A backward refuses what was written to since the forward, be it the same value.
                if _torch.version(tensor) != version:
                    tensor.copy_(value)

    def changed(self) -> bool:
        """Return whether anything is not as it was, in the modules or outside of them."""
        return self.changed_inside() or self._outside.changed()

    def changed_inside(self) -> bool:
        """Return whether anything in the modules is not as it was."""
        if any(_torch.version(tensor) != version for tensor, _, version in self._tensors):
            return True
        if self._held.changed():
            return True
        tables = [*self._tables, *((_attributes_of(own), before) for own, before in self._attributes)]
        return any(
            now.keys() != before.keys()
            or any(now[name] is not value for name, value in before.items() if name not in _torch.FLAT_WEIGHTS)
            for now, before in tables
        )


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers and attributes back afterwards.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    state = ModuleState(model)
    try:
        yield
    finally:
        state.restore()


def _hooks_of(model: nn.Module) -> int:
    """Return how many hooks of others stand on a model's modules; ours come and go."""
    return sum(not is_own(hook) for module in model.modules() for hook in _torch.forward_hooks(module))


def _attributes_of(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in _OWN}


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad and not value.is_inference()
