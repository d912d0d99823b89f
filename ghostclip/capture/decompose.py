"""Functions of ``torch.nn.functional`` written in Python: look inside instead of taking them for one operation."""

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from ghostclip.rules import rule_for

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

_CHECKS: Final = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_COPIES: dict[Callable[..., Any], Callable[..., Any]] = {}


def decompose(func: Callable[..., Any], name: str, session: "Session") -> Callable[..., Any] | None:
    """Return the function in a form that runs its own operations one by one, or None if it is one operation.

    Args:
        func: The torch function that received tracked tensors.
        name: Its name.
        session: Told that attention keeps its batch on axis 1.

    Returns:
        A callable with the same signature; its inner operations are intercepted as usual.
    """
    if not isinstance(func, FunctionType) or rule_for(name) is not None:
        return None
    if not any(check in func.__code__.co_names for check in _CHECKS):
        return None
    copy = _without_dispatch(func)
    if name != "multi_head_attention_forward":
        return _reentered(copy)

    def attention(*args: Any, **kwargs: Any) -> Any:
        # The function works on (T, B, E) whatever the module's batch_first says.
        record = session.record
        axis, record.axis = record.axis, 1
        try:
            return _reentered(copy)(*args, **kwargs)
        finally:
            record.axis = axis

    return attention


def _without_dispatch(func: FunctionType) -> Callable[..., Any]:
    """Return a copy of a Python torch function whose own override check is off; nested functions keep theirs."""
    if func not in _COPIES:
        scope = {**func.__globals__, **dict.fromkeys(_CHECKS, _never)}
        copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
        copy.__kwdefaults__ = func.__kwdefaults__
        _COPIES[func] = copy
    return _COPIES[func]


def _never(*args: Any) -> bool:
    return False


def _reentered(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with interception switched on again (it is off inside ``__torch_function__``)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return func(*args, **kwargs)

    return run
