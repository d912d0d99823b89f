"""Changes in place to what a factor holds, between its norm and its sum: autograd counts them."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.factors import Dense, Factor, Outer

_NO_TENSORS: Final = frozenset({type(None), bool, int, float, str, tuple, torch.Size, torch.dtype})


def versions(factor: Factor) -> list[int]:
    """Return the versions of the tensors in a factor, which count changes in place."""
    if type(factor) is Dense:
        return [_torch.version(factor.grad_BP)]
    if type(factor) is Outer:
        return _torch.versions((factor.a_NTI, factor.g_NTO))
    return _torch.versions(tensors_of(factor))


def formed(factor: Factor) -> Factor:
    """Return a factor that may wait: lazy parts, of data that may change, are formed now."""
    for _ in tensors_of(factor):
        pass
    return factor


def tensors_of(factor: Factor) -> Iterator[Tensor]:
    """Yield the tensors of a factor, and of factors inside it, in a fixed order."""
    if type(factor) is Dense:
        # It may be formed by this: a sum over positions counts as what it is then.
        yield factor.grad_BP
        return
    for value in vars(factor).values():
        # What most attributes are; asking whether they are factors costs more than the rest.
        if type(value) in _NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Factor):
            yield from tensors_of(value)
        elif isinstance(value, dict):
            for part in value.values():
                if isinstance(part, Factor):
                    yield from tensors_of(part)


def changed_in_place(name: str) -> str:
    """Return the text of a ``TamperedGradientError``."""
    return (
        f"parameter '{name}': what its gradient is made of was changed in place in the backward (by a hook on a "
        "layer's output, say), after its norm had been taken. Return a new tensor from the hook."
    )
