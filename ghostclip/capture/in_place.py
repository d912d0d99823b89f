"""A function in the place of one module's forward, for a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def in_place_of(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module, not of its class, within the block."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = run
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own
