"""What autocast makes of an operation's input, to be kept in the place of the input itself."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghostclip import _torch

_HALF = (torch.float16, torch.bfloat16)


class Casts:
    """The latest tensor that was cast for an operation: what several read (queries, keys, values) is cast once."""

    __slots__ = ("__weakref__", "_cast", "_changes", "_source")

    # The weight gradient of y = x Wᵀ, run by autocast in 16 bits, is that through the cast input: the float32 input of
    # twice the size took no part, and an ordinary backward does not store it.
    def __init__(self) -> None:
        self._source: Any = None
        self._changes = -1
        self._cast: Tensor | None = None

    def of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an input as the operation used it."""
        # In 16 bits, outside the graph, where autocast cast it, else itself.
        if tensor.dtype != torch.float32 or dtype not in _HALF:
            return tensor
        (version,) = _torch.versions([tensor])
        cast = self._cast
        if cast is None or cast.dtype != dtype or self._changes != version or self._source() is not tensor:
            with _torch.subclasses_off():
                cast = tensor.detach().to(dtype)
            self._source, self._changes, self._cast = weakref.ref(tensor, _dropping(self)), version, cast
        return cast

    def drop(self, source: Any) -> None:
        """Drop the cast whose source, a weak reference, is gone."""
        if self._source is source:
            self._source = self._cast = None


def _dropping(casts: Casts) -> Callable[[Any], None]:
    # A bound method would hold its object, which holds the reference that holds it.
    held = weakref.ref(casts)

    def drop(source: Any) -> None:
        alive = held()
        if alive is not None:
            alive.drop(source)

    return drop


def may_cast(tensor: Tensor) -> bool:
    """Return whether autocast may cast an operation's input to 16 bits."""
    # The type of a device is a string that is made anew each time.
    kind = "cpu" if tensor.is_cpu else tensor.device.type
    return _torch.autocast_is_on(kind) and tensor.dtype == torch.float32 and not tensor.is_inference()
