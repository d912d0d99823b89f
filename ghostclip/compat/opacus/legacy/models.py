"""What the first generation's scripts do with a model before it is trained."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ghostclip import _torch
from ghostclip.validation.fixers import ModuleValidator


def convert_batchnorm_modules(model: nn.Module, converter: Callable[[nn.Module], nn.Module] | None = None) -> nn.Module:
    """Replace batch norms, which mix samples.

    Args:
        model: The model; stays as it is unless a converter is given.
        converter: Makes what a batch norm is replaced by; a group norm by default.

    Returns:
        The model without batch norms.
    """
    if converter is None:
        return ModuleValidator.fix(model)
    if isinstance(model, _torch.AnyBatchNorm):
        return converter(model)
    for name, child in model.named_children():
        setattr(model, name, convert_batchnorm_modules(child, converter))
    return model


class DPModelInspector:
    """Says whether a model can be trained privately as far as its modules tell.

    Args:
        should_throw: Raise what was found instead of returning False.
    """

    def __init__(self, should_throw: bool = True) -> None:  # noqa: FBT001, FBT002 - Opacus's signature
        self.should_throw = should_throw

    def validate(self, model: nn.Module) -> bool:
        """Check a model.

        Args:
            model: The model.

        Returns:
            Whether nothing is wrong with it.

        Raises:
            UnsupportedError: What is wrong, if `should_throw`.
        """
        return not ModuleValidator.validate(model, strict=self.should_throw)
