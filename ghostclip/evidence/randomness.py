"""The generators that a forward may draw from: their states, and the same numbers once more."""

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch

# They have no generator of their own.
_WITHOUT: Final = frozenset({"cpu", "meta"})


class Randomness:
    """The states of all global generators at one moment: torch's (CPU and devices in use), Python's and NumPy's."""

    def __init__(self, tensors: Iterable[Tensor], *, only_torch: bool = False) -> None:
        """Keep the states.

        Args:
            tensors: Tensors on the devices in use.
            only_torch: Leave out Python's and NumPy's, which take far longer to read and to write.
        """
        devices = {tensor.device for tensor in tensors if tensor.device.type not in _WITHOUT}
        self._generators = [_generator_of(device) for device in sorted(devices, key=str)]
        self._generators.append((torch.get_rng_state, torch.set_rng_state))
        if not only_torch:
            self._generators.append((random.getstate, random.setstate))
        if not only_torch and "numpy" in sys.modules:
            legacy = sys.modules["numpy"].random
            self._generators.append((lambda: legacy.get_state(legacy=False), legacy.set_state))
        self._states = [read() for read, _ in self._generators]

    def restore(self) -> None:
        """Put every generator back."""
        for (_, write), state in zip(self._generators, self._states, strict=True):
            write(state)

    def drawn(self) -> bool:
        """Return whether a number was drawn since."""
        pairs = zip(self._generators, self._states, strict=True)
        return any(not _same(read(), state) for (read, _), state in pairs)


def _generator_of(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return what reads and what writes the state of a device's default generator."""
    module: Any = torch.get_device_module(device)
    if device.index is None:
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return bool((one == two).all()) if hasattr(one, "all") else bool(one == two)


@contextmanager
def unnoticed(tensors: Iterable[Tensor]) -> Iterator[Randomness]:
    """Run a model for a look at it: afterwards every generator is where it was, and nothing was said.

    Args:
        tensors: Tensors on the devices in use.

    Yields:
        The states of the generators before.
    """
    before = Randomness(tensors)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield before
    finally:
        before.restore()
        # Weights that were cast for autocast here are not in any graph: the next forward must not find them.
        torch.clear_autocast_cache()


class Draws(_torch.DispatchMode):
    """Notes which random tensors are drawn, in order.

    Attributes:
        seen: The operation and the shapes of what it returned.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation, and note it if it is seeded."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            found = result if isinstance(result, tuple) else (result,)
            self.seen.append((func, *(tuple(item.shape) for item in found if isinstance(item, Tensor))))
        return result
