"""Operations that say in one call what others say in a way that samples can be followed through."""

from collections.abc import Callable
from typing import Any

import torch
from opt_einsum import contract_path
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.operation import Operation
from ghostclip.capture.tracked import TrackedTensor


def rewritten(operation: Operation) -> Callable[[], Any] | None:
    """Return the same computation in other operations, which are intercepted as usual, or None."""
    rule = _RULES.get(operation.name)
    run = None if rule is None else rule(operation)
    if run is None:
        return None

    def again() -> Any:
        # Interception is off inside ``__torch_function__``.
        with _torch.overrides_on():
            return run()

    return again


def _einsum(operation: Operation) -> Callable[[], Any] | None:
    """Two operands at a time where several are tracked, as a product of factors (LoRA) needs it."""
    equation, *operands = operation.args
    several = sum(isinstance(operand, TrackedTensor) for operand in operands) > 1
    if not several or len(operands) < 3 or not isinstance(equation, str) or "." in equation:
        return None
    shapes = [tuple(operand.shape) for operand in operands]

    def run() -> Any:
        left = list(operands)
        for places, _, step, *_ in contract_path(equation, *shapes, shapes=True, einsum_call=True)[1]:
            picked = [left.pop(place) for place in places]
            left.append(torch.einsum(step, *picked))
        return left[0]

    return run


def _masked_fill(operation: Operation) -> Callable[[], Any] | None:
    given = {**dict(zip(("input", "mask", "value"), operation.args, strict=False)), **operation.kwargs}
    x, mask, value = (given.get(name) for name in ("input", "mask", "value"))
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
