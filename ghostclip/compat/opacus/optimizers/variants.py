"""Opacus's optimizers by name: each makes a `DPOptimizer` with another clip policy or noise source, and adds nothing.

`isinstance` asks what an optimizer does: one that `make_private` returned is an instance of the name that fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ghostclip._validate import choice
from ghostclip.capture.replicas import sums_meet_elsewhere
from ghostclip.clipper import GhostClipper
from ghostclip.clipping import policies
from ghostclip.clipping.adaptation import QuantileAdaptation
from ghostclip.clipping.grouping import PerParameter
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.compat.opacus.described import Described
from ghostclip.distributed import SharedNoise
from ghostclip.errors import InvalidOptionError
from ghostclip.facade.handle import clipper_of
from ghostclip.facade.modes import strategy_of
from ghostclip.noise import make_noise_source
from ghostclip.optim.dp_optimizer import DPOptimizer


class DPPerLayerOptimizer(DPOptimizer, metaclass=Described):
    """A private optimizer that clips every parameter's gradient by itself.

    Args:
        optimizer: The optimizer over the parameters of a `GradSampleModule`.
        noise_multiplier: σ, in units of √(Σ_l C_l²).
        max_grad_norm: One bound C_l for each trainable parameter, in the model's order.
        expected_batch_size: The public constant that the sum is divided by.
        loss_reduction: "mean" or "sum".
        generator: Makes the noise reproducible, and so not private against who knows it.
        secure_mode: Whether noise comes from a cryptographic keystream.
    """

    def __init__(  # noqa: PLR0913 - Opacus's arguments
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        _clip_with(optimizer, policies.per_layer(max_grad_norm))
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )

    @classmethod
    def describes(cls, optimizer: DPOptimizer) -> bool:
        """Say whether an optimizer clips every parameter's gradient by itself.

        Args:
            optimizer: The optimizer.

        Returns:
            True if so.
        """
        return isinstance(optimizer.clipper.policy.grouping, PerParameter)


class AdaClipDPOptimizer(DPOptimizer, metaclass=Described):
    """A private optimizer whose bound follows a quantile of the norms; see `QuantileAdaptation`.

    Args:
        optimizer: The optimizer over the parameters of a `GradSampleModule`.
        noise_multiplier: σ of a step, noisy count included.
        target_unclipped_quantile: Share of samples that stays unclipped.
        clipbound_learning_rate: How fast C moves.
        max_clipbound: Largest C.
        min_clipbound: Smallest C.
        unclipped_num_std: Standard deviation of the noisy count.
        max_grad_norm: C of the first step.
        expected_batch_size: The public constant that sum and count are divided by.
        loss_reduction: "mean" or "sum".
        generator: Makes the noise reproducible, and so not private against who knows it.
        secure_mode: Whether noise comes from a cryptographic keystream.
    """

    def __init__(  # noqa: PLR0913 - Opacus's arguments
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        target_unclipped_quantile: float,
        clipbound_learning_rate: float,
        max_clipbound: float,
        min_clipbound: float,
        unclipped_num_std: float,
        max_grad_norm: float,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        adaptation = QuantileAdaptation(
            target_unclipped_quantile=target_unclipped_quantile,
            clipbound_learning_rate=clipbound_learning_rate,
            unclipped_num_std=unclipped_num_std,
            min_clipbound=min_clipbound,
            max_clipbound=max_clipbound,
        )
        _clip_with(optimizer, policies.adaptive(max_grad_norm, adaptation))
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )

    @classmethod
    def describes(cls, optimizer: DPOptimizer) -> bool:
        """Say whether an optimizer's bound follows a quantile of the norms.

        Args:
            optimizer: The optimizer.

        Returns:
            True if so.
        """
        return optimizer.clipper.policy.adaptation is not None


class DistributedDPOptimizer(DPOptimizer, metaclass=Described):
    """A private optimizer that adds up the ranks' clipped sums and adds noise once.

    Privacy:
        A record must be in one rank's part of a logical batch only, as `DPDataLoader` and
        `DistributedUniformWithReplacementSampler` see to.

    Args:
        optimizer: Each rank's optimizer over the parameters of its `GradSampleModule`; called on all ranks.
        noise_multiplier: σ of the step of all ranks together.
        max_grad_norm: C, or one bound for each trainable parameter.
        expected_batch_size: The public constant that the sum is divided by, over all ranks.
        loss_reduction: "mean" or "sum".
        generator: Makes the noise reproducible, and so not private against who knows it.
        secure_mode: Whether noise comes from a cryptographic keystream.

    Raises:
        InvalidOptionError: If torch.distributed is not running.
    """

    def __init__(  # noqa: PLR0913 - Opacus's arguments
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        source = make_noise_source(level="secure" if secure_mode else "fast", generator=generator)
        several = isinstance(max_grad_norm, Sequence)
        _clip_with(optimizer, policies.per_layer(max_grad_norm) if several else ClipPolicy(max_grad_norm))
        sums_meet_elsewhere(_clipper(optimizer).model, shared=True)
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            noise_source=SharedNoise(source),
        )

    @classmethod
    def describes(cls, optimizer: DPOptimizer) -> bool:
        """Say whether an optimizer shares its noise with other ranks.

        Args:
            optimizer: The optimizer.

        Returns:
            True if so.
        """
        return isinstance(optimizer.noise_source, SharedNoise)


_BY_CLIPPING: dict[tuple[str, bool], Callable[..., DPOptimizer]] = {
    ("flat", False): DPOptimizer,
    ("flat", True): DistributedDPOptimizer,
    ("per_layer", False): DPPerLayerOptimizer,
    ("per_layer", True): DistributedDPOptimizer,
    ("adaptive", False): AdaClipDPOptimizer,
}


def get_optimizer_class(
    clipping: str,
    distributed: bool,  # noqa: FBT001 - Opacus's signature
    grad_sample_mode: str | None = None,
) -> Callable[..., DPOptimizer]:
    """Return what makes a private optimizer; clipping works with every mode here.

    Args:
        clipping: "flat", "per_layer" or "adaptive".
        distributed: Whether several ranks train together.
        grad_sample_mode: Only checked.

    Returns:
        `DPOptimizer`, or a name for one.

    Raises:
        InvalidOptionError: If there is none for the combination.
    """
    if grad_sample_mode is not None:
        strategy_of(grad_sample_mode)
    key = (choice(clipping, "clipping", ("flat", "per_layer", "adaptive")), distributed)
    if key not in _BY_CLIPPING:
        raise InvalidOptionError(
            f"clipping={clipping!r} with distributed={distributed}: use PrivacyEngine.make_private, which shares the "
            "loader's batches and the noise among ranks."
        )
    return _BY_CLIPPING[key]


def _clip_with(optimizer: Any, policy: ClipPolicy) -> None:
    _clipper(optimizer).policy = policy


def _clipper(optimizer: Optimizer) -> GhostClipper:
    return clipper_of([p for group in optimizer.param_groups for p in group["params"]])
