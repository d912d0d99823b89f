"""Functions written in operations that samples can be followed through: others in one call, or those they consist of.

Functions of ``torch.nn.functional`` that are written in Python run as they are; recurrent layers and cells, which torch
has as single functions, run as ``ghostclip.rules.recurrent`` writes them out; ``linear_cross_entropy`` runs without
logits.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from opt_einsum import contract_path
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.tracked import Operation, TrackedTensor
from ghostclip.rules import rule_for
from ghostclip.rules.head import linear_cross_entropy
from ghostclip.rules.recurrent import CELLS, LAYERS, WRITTEN_OUT, is_packed

# In the code of torch functions that dispatch on their arguments' classes: their body does not run on tracked ones.
_CHECKS: Final = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_COPIES: dict[Callable[..., Any], Callable[..., Any]] = {}


def decompose(func: Callable[..., Any], name: str, forward: ForwardContext) -> Callable[..., Any] | None:
    """Return the function in a form that runs its own operations one by one, or None if it is one operation."""
    inside = inside_of(func, name)
    if inside is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        # Attention and recurrent layers work on (T, B, E) whatever the module's batch_first says.
        second = name == "multi_head_attention_forward" or (name in LAYERS and not is_packed(args, kwargs))
        if name in CELLS and len(args) > 1:
            forward.around.rows.lay_beside(args[0], args[1])
        with forward.along(1 if second else forward.batch_axis), forward.around.rows.inside():
            return inside(*args, **kwargs)

    return run


def inside_of(func: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Return a torch function such that operations in its Python body are intercepted; None if it has no such body."""
    if name in WRITTEN_OUT:
        return _reentered(WRITTEN_OUT[name])
    if not isinstance(func, FunctionType) or rule_for(name) is not None:
        return None
    if not any(check in func.__code__.co_names for check in _CHECKS):
        return None
    if name == "linear_cross_entropy":
        return _reentered(partial(linear_cross_entropy, otherwise=_without_dispatch(func)))
    return _reentered(_without_dispatch(func))


def _without_dispatch(func: FunctionType) -> Callable[..., Any]:
    """Return a copy of a Python torch function without its own override check; nested functions keep theirs."""
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
        with _torch.overrides_on():
            return func(*args, **kwargs)

    return run


def rewritten(operation: Operation) -> Callable[[], Any] | None:
    """Return the same computation in other operations, which are intercepted as usual, or None."""
    rule = _RULES.get(operation.name)
    run = None if rule is None else rule(operation)
    return None if run is None else _reentered(run)


def _einsum(operation: Operation) -> Callable[[], Any] | None:
    """Two operands at a time where several are tracked, as a product of factors (LoRA) needs it."""
    equation, *operands = operation.args
    several = sum(isinstance(operand, TrackedTensor) for operand in operands) > 1
    if not several or len(operands) < 3 or not isinstance(equation, str) or "." in equation:
        return None
    shapes = [tuple(operand.shape) for operand in operands]

    def run() -> Any:
        left = list(operands)
        for indices, _, step, *_ in contract_path(equation, *shapes, shapes=True, einsum_call=True)[1]:
            picked = [left.pop(index) for index in indices]
            left.append(torch.einsum(step, *picked))
        return left[0]

    return run


def _masked_fill(operation: Operation) -> Callable[[], Any] | None:
    """``x.masked_fill(mask, p)`` as `torch.where`, whose capture is elementwise."""
    arguments = {**dict(zip(("input", "mask", "value"), operation.args, strict=False)), **operation.kwargs}
    x, mask, value = (arguments.get(name) for name in ("input", "mask", "value"))
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or not isinstance(value, TrackedTensor):
        return None

    def run() -> Any:
        filled = torch.where(mask, value.to(x.dtype), x)
        return x.copy_(filled) if operation.is_in_place else filled

    return run


def _masked_rows(operation: Operation) -> Callable[[], Any] | None:
    """``x[mask] = p`` with one value for all masked positions."""
    x, mask, value = operation.args
    if isinstance(x, TrackedTensor) or not isinstance(mask, Tensor) or not isinstance(value, TrackedTensor):
        return None
    if mask.dtype != torch.bool or value.origin.value.dim() > x.dim() - mask.dim():
        return None

    def run() -> None:
        spread = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        x.copy_(torch.where(spread, value.to(x.dtype), x))

    return run


_RULES: dict[str, Callable[[Operation], Callable[[], Any] | None]] = {
    "einsum": _einsum,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill,
    "__setitem__": _masked_rows,
}
