"""Criterion and loss of two-pass training under a bound that follows a quantile of the norms, under Opacus's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ghostclip.assembly.clipping_options import ClippingOptions
from ghostclip.compat.opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from ghostclip.errors import InvalidOptionError


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """Lets the bound adapt, and returns a criterion whose `loss.backward()` clips every sample's gradient.

    Privacy:
        The private optimizer moves the bound in its step, from a noisy count that is a part of the step's release, so
        that σ is the whole step's. The criterion itself releases nothing.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters; its C is the first one.
        criterion: The loss function.
        loss_reduction: As the facade was told.
        target_unclipped_quantile: Share of samples that stays unclipped.
        min_clipbound: Smallest C.
        max_clipbound: Largest C.
        clipbound_learning_rate: How fast C moves.
        initial_noise_multiplier: Of no effect: σ is the optimizer's.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - Opacus's arguments
        self,
        module: Any,
        optimizer: Any,
        criterion: Callable[..., torch.Tensor],
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        del initial_noise_multiplier
        super().__init__(module, optimizer, criterion, loss_reduction)
        _adapt(optimizer, target_unclipped_quantile, clipbound_learning_rate, (min_clipbound, max_clipbound))


class DPTensorFastGradientAdaptiveClipping(DPTensorFastGradientClipping):
    """Lets the bound adapt, and stands for the losses of a batch; see `DPLossFastGradientAdaptiveClipping`.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        loss_per_sample: The losses, `[B]`.
        loss_reduction: As the facade was told.
        target_unclipped_quantile: Share of samples that stays unclipped.
        min_clipbound: Smallest C.
        max_clipbound: Largest C.
        clipbound_learning_rate: How fast C moves.
        initial_noise_multiplier: Of no effect: σ is the optimizer's.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - Opacus's arguments
        self,
        module: Any,
        optimizer: Any,
        loss_per_sample: torch.Tensor,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        del initial_noise_multiplier
        super().__init__(module, optimizer, loss_per_sample, loss_reduction)
        _adapt(optimizer, target_unclipped_quantile, clipbound_learning_rate, (min_clipbound, max_clipbound))


def _adapt(optimizer: Any, quantile: float, rate: float, bounds: tuple[float, float]) -> None:
    """Let the optimizer's bound follow the quantile, unless it does already: then it stays where it has got to."""
    asked = {
        "target_unclipped_quantile": quantile,
        "clipbound_learning_rate": rate,
        "min_clipbound": bounds[0],
        "max_clipbound": bounds[1],
    }
    adaptation = optimizer.clipper.policy.adaptation
    if adaptation is not None and asked.items() <= adaptation.describe().items():
        return
    if optimizer.expected_batch_size is None:
        raise InvalidOptionError(
            "optimizer with expected_batch_size=None: an adaptive clip bound divides its count by it."
        )
    options = ClippingOptions(
        clipping="adaptive", max_grad_norm=optimizer.max_grad_norm, unclipped_num_std=None, **asked
    )
    optimizer.clipper.policy = options.policy(
        expected_batch_size=optimizer.expected_batch_size, noise_multiplier=optimizer.noise_multiplier
    )
