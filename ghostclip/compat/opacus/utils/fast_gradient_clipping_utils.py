"""The criterion and the loss of two-pass training, put together by hand as scripts for Opacus do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ghostclip._validate import choice
from ghostclip.clipper import GhostClipper
from ghostclip.compat.opacus.described import Described
from ghostclip.errors import InvalidOptionError
from ghostclip.facade import GradSampleHooks, GradSampleModule, PrivateCriterion, PrivateLoss
from ghostclip.optim import DPOptimizer, release_of


class DPLossFastGradientClipping(PrivateCriterion, metaclass=Described):
    """A criterion whose `loss.backward()` clips every sample's gradient.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        criterion: The loss function.
        loss_reduction: As the facade was told.

    Raises:
        InvalidOptionError: If the three do not belong together.
    """

    def __init__(
        self,
        module: GradSampleModule | GradSampleHooks,
        optimizer: DPOptimizer,
        criterion: Callable[..., torch.Tensor],
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__(common_clipper(module, optimizer, loss_reduction), criterion)

    @classmethod
    def describes(cls, criterion: PrivateCriterion) -> bool:
        """Say that every private criterion is one.

        Args:
            criterion: The criterion.

        Returns:
            True.
        """
        del criterion
        return True


class DPTensorFastGradientClipping(PrivateLoss, metaclass=Described):
    """The losses of a batch as one loss, whose `backward()` clips every sample's gradient.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        loss_per_sample: The losses, `[B]`.
        loss_reduction: As the facade was told.

    Raises:
        InvalidOptionError: If the three do not belong together.
    """

    def __init__(
        self,
        module: GradSampleModule | GradSampleHooks,
        optimizer: DPOptimizer,
        loss_per_sample: torch.Tensor,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__(common_clipper(module, optimizer, loss_reduction), loss_per_sample)

    @classmethod
    def describes(cls, loss: PrivateLoss) -> bool:
        """Say that every private loss is one.

        Args:
            loss: The loss.

        Returns:
            True.
        """
        del loss
        return True


def common_clipper(module: Any, optimizer: Any, loss_reduction: str) -> GhostClipper:
    """Return the clipper that a facade and an optimizer share.

    Args:
        module: The facade of a model.
        optimizer: The private optimizer over its parameters.
        loss_reduction: As the facade was told.

    Returns:
        The clipper.

    Raises:
        InvalidOptionError: If one of them is no such object, or they do not belong together.
    """
    if not isinstance(module, (GradSampleModule, GradSampleHooks)):
        raise InvalidOptionError(
            f"module {type(module).__name__}: not wrapped. Give what make_private() returned in its place, or "
            "GradSampleModuleFastGradientClipping(module)."
        )
    optimizer = release_of(optimizer)
    if not isinstance(optimizer, DPOptimizer):
        raise InvalidOptionError(
            f"optimizer {type(optimizer).__name__}: not private. Give what make_private() returned in its place, or "
            "DPOptimizerFastGradientClipping(optimizer, ...)."
        )
    clipper: GhostClipper = optimizer.clipper
    if clipper is not module.clipper:
        raise InvalidOptionError(
            "optimizer: it is not the private optimizer of this module. Make it from the module's parameters after the "
            "module was wrapped."
        )
    if choice(loss_reduction, "loss_reduction", ("mean", "sum")) != clipper.loss_reduction:
        raise InvalidOptionError(
            f"loss_reduction={loss_reduction!r}: the module was told {clipper.loss_reduction!r}; use one."
        )
    return clipper
