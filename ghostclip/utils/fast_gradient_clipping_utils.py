"""The criterion and the loss of two-pass training, put together by hand as scripts for Opacus do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ghostclip._validate import choice
from ghostclip.clipping.clipper import GhostClipper
from ghostclip.errors import InvalidOptionError
from ghostclip.grad_sample import GradSampleHooks, GradSampleModule, PrivateCriterion, PrivateLoss
from ghostclip.optimizers import DPOptimizer


def DPLossFastGradientClipping(  # noqa: N802 - Opacus's name
    module: GradSampleModule | GradSampleHooks,
    optimizer: DPOptimizer,
    criterion: Callable[..., torch.Tensor],
    loss_reduction: str = "mean",
) -> PrivateCriterion:
    """Return a criterion whose `loss.backward()` clips every sample's gradient.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        criterion: The loss function.
        loss_reduction: As the facade was told.

    Returns:
        The criterion.

    Raises:
        InvalidOptionError: If the three do not belong together.
    """
    return PrivateCriterion(_common_clipper(module, optimizer, loss_reduction), criterion)


def DPTensorFastGradientClipping(  # noqa: N802 - Opacus's name
    module: GradSampleModule | GradSampleHooks,
    optimizer: DPOptimizer,
    loss_per_sample: torch.Tensor,
    loss_reduction: str = "mean",
) -> PrivateLoss:
    """Return the losses of a batch as one loss, whose `backward()` clips every sample's gradient.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        loss_per_sample: The losses, `[B]`.
        loss_reduction: As the facade was told.

    Returns:
        The loss.

    Raises:
        InvalidOptionError: If the three do not belong together.
    """
    return PrivateLoss(_common_clipper(module, optimizer, loss_reduction), loss_per_sample)


def _common_clipper(
    module: GradSampleModule | GradSampleHooks, optimizer: DPOptimizer, loss_reduction: str
) -> GhostClipper:
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
