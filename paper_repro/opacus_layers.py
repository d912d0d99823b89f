"""Layers that Opacus trains only through modules of its own: the swap that its users make before training."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _replacement(module: nn.Module) -> nn.Module | None:
    """Opacus's own module with the same weights, for a layer that it does not take as it is."""
    from opacus.layers import DPRNN
    from opacus.validators.module_validator import ModuleValidator

    if type(module) is nn.RNN:
        made: nn.Module = DPRNN(
            module.input_size, module.hidden_size, module.num_layers, bias=module.bias, batch_first=module.batch_first
        )
        made.load_state_dict(module.state_dict())
        return made
    fixer = ModuleValidator.FIXERS.get(type(module))
    return fixer(module) if fixer and isinstance(module, nn.RNNBase | nn.MultiheadAttention) else None


def needs_opacus_layers(model: nn.Module) -> bool:
    """Whether `with_opacus_layers` would change something.

    Args:
        model: Any model.
    """
    return any(isinstance(module, nn.RNNBase | nn.MultiheadAttention) for module in model.modules())


def with_opacus_layers(model: nn.Module) -> nn.Module:
    """Swap recurrent and attention layers for Opacus's, in place.

    Args:
        model: The model; layers that are kept are shared with the result.

    Returns:
        The model; another one if it was such a layer itself.
    """
    for name, module in list(model.named_modules()):
        made = _replacement(module)
        if made is None:
            continue
        weight = next(module.parameters())
        made = made.to(weight.device, weight.dtype).train(module.training)
        if not name:
            return made
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, made)
    return model


def same_function(model: nn.Module, swapped: nn.Module, inputs: Tensor) -> bool:
    """Whether the swap left the outputs as they were.

    Args:
        model: The model before.
        swapped: The model after.
        inputs: A batch.
    """
    with torch.no_grad():
        before, after = model(inputs), swapped(inputs)
    return before.shape == after.shape and torch.allclose(before, after, rtol=1e-4, atol=1e-5)
