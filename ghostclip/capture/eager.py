"""Keep ``torch.compile`` away from forwards whose parameters are substituted.

The compiler traces Python frames ahead of time; what a clipper does in a forward (substituting parameters, following
rows, keeping inputs) happens as it runs. A compiled model therefore runs eagerly while a clipper watches it, and
compiled otherwise: in evaluation, without gradients, or once the clipper is removed.
"""

from types import CodeType
from typing import Any

from ghostclip import _torch

_UNTRACED: list[CodeType] = []


def suspend() -> Any:
    """Stop the compiler from taking further frames; return the state for ``resume``, None if it was never loaded."""
    return _torch.stop_compiler(_UNTRACED)


def resume(suspended: Any) -> None:
    """Let the compiler go on as before."""
    _torch.restart_compiler(suspended)


def untraced(function: Any) -> Any:
    """Mark a function that the compiler must neither trace nor look into."""
    _UNTRACED.append(function.__code__)
    _torch.mark_untraced(function, reason="it substitutes parameters in a forward, which cannot be compiled")
    return function
