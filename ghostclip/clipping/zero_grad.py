"""The model's own ``zero_grad()``, which must discard clipped sums although they are not in ``.grad``.

Pickles of models name `_own_zero_grad` by this module.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn


def _own_zero_grad(model: nn.Module) -> Any:
    return types.MethodType(type(model).zero_grad, model)


class _DiscardingZeroGrad:
    """Replacement of a model's method ``zero_grad``; a copy or a pickle of the model has its own method instead."""

    def __init__(self, model: nn.Module, discard: Callable[[], Callable[[], None] | None]) -> None:
        self._model = model
        self._discard = discard

    def __call__(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        discard = self._discard()
        if discard is not None:
            discard()
        _own_zero_grad(self._model)(set_to_none)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_zero_grad, (self._model,)


class ZeroGrad:
    """Replaces a model's ``zero_grad`` by one that discards clipped sums, and restores it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._installed: _DiscardingZeroGrad | None = None

    def install(self, discard: Callable[[], Callable[[], None] | None]) -> None:
        """Let ``model.zero_grad()`` discard clipped sums."""
        # ``discard`` returns what discards them, or None once that is gone.
        self._installed = _DiscardingZeroGrad(self._model, discard)
        self._model.__dict__["zero_grad"] = self._installed

    def uninstall(self) -> None:
        """Restore the model's own method."""
        if self._installed is not None and self._model.__dict__.get("zero_grad") is self._installed:
            del self._model.__dict__["zero_grad"]
        self._installed = None
