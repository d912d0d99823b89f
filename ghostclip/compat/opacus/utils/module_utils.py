"""Small questions about a module's parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import nn


def has_trainable_params(module: nn.Module) -> bool:
    """Say whether a module itself, not its children, owns a trainable parameter.

    Args:
        module: The module.

    Returns:
        Whether it does.
    """
    return requires_grad(module)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Say whether a module owns a trainable parameter.

    Args:
        module: The module.
        recurse: Whether its children count too.

    Returns:
        Whether it does.
    """
    return any(p.requires_grad for p in module.parameters(recurse=recurse))


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the modules inside a module, itself included, that own parameters.

    Args:
        module: The module.

    Yields:
        (name, module).
    """
    for name, part in module.named_modules():
        if next(part.parameters(recurse=False), None) is not None:
            yield name, part


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the modules inside a module, itself included, that own trainable parameters.

    Args:
        module: The module.

    Yields:
        (name, module).
    """
    for name, part in parametrized_modules(module):
        if requires_grad(part):
            yield name, part


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List the trainable parameters of a module and its children, each once.

    Args:
        module: The module.

    Yields:
        (name, parameter).
    """
    for name, p in module.named_parameters():
        if p.requires_grad:
            yield name, p


def clone_module(module: nn.Module) -> nn.Module:
    """Return an independent copy of a module.

    Args:
        module: The module.

    Returns:
        The copy, on the same devices.
    """
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Return a module inside another one.

    Args:
        module: The outer module.
        target: Dotted name; "" is the module itself.

    Returns:
        The inner module.

    Raises:
        AttributeError: If there is none of that name.
    """
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, torch.Tensor], sd2: Mapping[str, torch.Tensor]) -> bool:
    """Say whether two states hold the same names with the same values.

    Args:
        sd1: A state.
        sd2: Another one.

    Returns:
        Whether they do, values compared exactly.
    """
    return sd1.keys() == sd2.keys() and all(torch.equal(value, sd2[name]) for name, value in sd1.items())
