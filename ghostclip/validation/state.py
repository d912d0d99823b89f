"""Leaving a model as it was: values, gradients, modes, randomness."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.evidence.module_state import restored


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put everything about a model, and the global generators, back as they were.

    Args:
        model: The model. Its ``.grad`` are None inside.

    Yields:
        Nothing.
    """
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    places = {tensor.device for tensor in tensors}
    devices = sorted(place.index or 0 for place in places if place.type == "cuda")
    with restored(model), torch.random.fork_rng(devices=devices):
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            for module, training in modes:
                module.training = training
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    # A copy counts as a change of the tensor: only where it is needed.
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout rate that modules keep as a number to 0: dropout layers, attention, recurrent layers, paths.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    changed: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            rate = "drop" in name.lower() or (name == "p" and isinstance(module, _torch.AnyDropout))
            if rate and isinstance(value, float) and 0 < value <= 1:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
