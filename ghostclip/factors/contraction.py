"""Contractions of more than two tensors, in an order chosen by opt_einsum once per shape."""

from functools import lru_cache
from typing import Any

from opt_einsum import contract_expression
from torch import Tensor


def contraction(subscripts: str, *tensors: Tensor) -> Tensor:
    """Contract tensors as ``einsum`` with an explicit output does, along the cheapest path."""
    expression = _expression(subscripts, tuple(tuple(tensor.shape) for tensor in tensors))
    result: Tensor = expression(*tensors)
    return result


@lru_cache(maxsize=512)
def _expression(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    return contract_expression(subscripts, *shapes)
