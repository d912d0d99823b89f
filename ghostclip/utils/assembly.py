"""Puts a model, its clipper and the private optimizer together, once it is settled what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip import _validate
from ghostclip.clipping.clipper import GhostClipper, Reduction
from ghostclip.errors import GhostClipError, InvalidOptionError, UncoveredParameterError, UnsupportedModelError
from ghostclip.grad_sample import GradSampleHooks, GradSampleModule, PrivateCriterion, strategy_of
from ghostclip.noise import LEVELS, NoiseSource
from ghostclip.optimizers import DPOptimizer
from ghostclip.utils.clipping_options import ClippingOptions
from ghostclip.utils.sampling_plan import SamplingPlan

_TWO_PASS = ("ghost", "fast")

PrivateModule = GradSampleModule | GradSampleHooks
Private = tuple[PrivateModule, DPOptimizer, DataLoader[Any]]
PrivateWithCriterion = tuple[PrivateModule, DPOptimizer, PrivateCriterion, DataLoader[Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked of `make_private`, once the noise multiplier and the sampling are known."""

    module: nn.Module
    optimizer: Optimizer
    criterion: Callable[..., torch.Tensor] | None
    plan: SamplingPlan
    noise_multiplier: float
    clipping: ClippingOptions
    batch_first: bool
    loss_reduction: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    probe: bool


def noise_level_of(noise_level: str | None, *, secure_mode: bool) -> str:
    """Return the level of the engine's noise.

    Args:
        noise_level: As the user gave it, or None.
        secure_mode: Opacus's name for a level that is at least "secure".

    Returns:
        "fast", "secure" or "exact".

    Raises:
        InvalidOptionError: If the level is unknown, or the two contradict each other.
    """
    if noise_level is None:
        return "secure" if secure_mode else "fast"
    if _validate.choice(noise_level, "noise_level", LEVELS) == "fast" and secure_mode:
        raise InvalidOptionError("noise_level='fast' with secure_mode=True: leave one of them out.")
    return noise_level


def check_options(
    *, rand_on_empty: bool, noise_generator: torch.Generator | None, noise_level: str, grad_sample_mode: str
) -> None:
    """Refuse what Opacus offers and this engine does not.

    Args:
        rand_on_empty: As the user gave it.
        noise_generator: As the user gave it.
        noise_level: Of the engine's noise.
        grad_sample_mode: As the user gave it.

    Raises:
        InvalidOptionError: If one of them is refused.
    """
    if rand_on_empty:
        raise InvalidOptionError(
            "rand_on_empty=True would train on made-up records. Leave it out: a batch without records has tensors "
            "of length 0 and becomes a step of pure noise."
        )
    if noise_generator is not None and noise_level != "fast":
        raise InvalidOptionError(
            f"noise_generator with noise_level={noise_level!r} (secure_mode): secure noise cannot be reproduced."
        )
    if strategy_of(grad_sample_mode) != "hooks" and noise_level == "exact":
        raise InvalidOptionError(
            f"grad_sample_mode={grad_sample_mode!r} with noise_level='exact': gradients are rounded sample by sample, "
            "which needs them one by one. Use grad_sample_mode='hooks', or noise_level='secure'."
        )


def coordinates_of(module: nn.Module, noise_level: str) -> int:
    """Return how many numbers a release with discrete noise holds.

    Args:
        module: The model, private or not.
        noise_level: Of the engine's noise.

    Returns:
        Trainable elements; 0 for continuous noise.
    """
    return sum(p.numel() for p in module.parameters() if p.requires_grad) if noise_level == "exact" else 0


def assemble(request: Request, noise_source: NoiseSource) -> Private | PrivateWithCriterion:
    """Attach a clipper to the model and build the private objects around it.

    Args:
        request: What the user asked for.
        noise_source: Where the noise comes from.

    Returns:
        (module, optimizer, loader), or (module, optimizer, criterion, loader) in a two-pass strategy with a criterion.

    Raises:
        InvalidOptionError: If an option is unknown or out of range; nothing stays attached to the model then.
        UnsupportedModelError: If the model is in evaluation mode or distributed.
        UncoveredParameterError: If the optimizer holds parameters that are not the model's.
    """
    module = _bare(request.module)
    optimizer = request.optimizer
    if isinstance(optimizer, DPOptimizer):
        optimizer = optimizer.original_optimizer
    check_objects(module, optimizer)
    clipper = GhostClipper(
        _inside(module),
        policy=request.clipping.policy(
            expected_batch_size=request.plan.expected_batch_size,
            noise_multiplier=_validate.non_negative(request.noise_multiplier, "noise_multiplier"),
        ),
        strategy=strategy_of(request.grad_sample_mode),
        loss_reduction=cast(Reduction, _validate.choice(request.loss_reduction, "loss_reduction", ("mean", "sum"))),
        batch_first=request.batch_first,
        relation=request.plan.event.relation,
        probe=request.probe,
    )
    try:
        return _around(clipper, optimizer, replace(request, module=module), noise_source)
    except GhostClipError:
        clipper.remove()
        raise


def _around(
    clipper: GhostClipper, optimizer: Optimizer, request: Request, noise_source: NoiseSource
) -> Private | PrivateWithCriterion:
    """Build what is handed back.

    Args:
        clipper: Attached to the bare model.
        optimizer: The bare optimizer.
        request: What the user asked for, of the bare model.
        noise_source: Where the noise comes from.

    Returns:
        As `assemble`.
    """
    loader = request.plan.loader
    private_optimizer = DPOptimizer(
        optimizer,
        noise_multiplier=request.noise_multiplier,
        expected_batch_size=request.plan.expected_batch_size,
        loss_reduction=request.loss_reduction,
        clipper=clipper,
        noise_source=noise_source,
    )
    wrap = GradSampleModule if request.wrap_model else GradSampleHooks
    private_module = wrap(request.module, clipper=clipper)
    criterion = request.criterion
    if criterion is None and request.grad_sample_mode == "ghost":
        # Opacus's default, which scripts for its ghost mode rely on.
        criterion = nn.CrossEntropyLoss(reduction=request.loss_reduction)
    if criterion is None:
        return private_module, private_optimizer, loader
    # Built for every strategy: it refuses a reduction that would scale the gradients before they are clipped.
    private_criterion = PrivateCriterion(clipper, criterion)
    if request.grad_sample_mode in _TWO_PASS:
        return private_module, private_optimizer, private_criterion, loader
    return private_module, private_optimizer, loader


def _bare(module: nn.Module) -> nn.Module:
    """Return the model itself, without what an earlier `make_private` put around it."""
    return module.to_standard_module() if isinstance(module, GradSampleModule) else module


def _inside(module: nn.Module) -> nn.Module:
    """Return the module to attach to: Fabric's wrapper lets nobody else start a backward at its own outputs.

    Args:
        module: The bare model.

    Returns:
        The model in the wrapper, which goes on casting inputs and outputs around it; any other module as it is.

    Raises:
        UnsupportedModelError: If there is more than casts around it, as where gradients are summed over ranks.
    """
    if type(module).__name__ != "_FabricModule":
        return module
    inner = cast(nn.Module, module.module)
    if module._forward_module is not inner:
        raise UnsupportedModelError(
            f"module was set up by Fabric, with {type(module._forward_module).__name__} around it. Call make_private "
            "with the model, optimizer and loader themselves, then fabric.setup on what it returns."
        )
    return inner


def check_objects(module: nn.Module, optimizer: Optimizer) -> None:
    """Check that model and optimizer go together.

    Args:
        module: The bare model.
        optimizer: The bare optimizer.

    Raises:
        UnsupportedModelError: If the model is in evaluation mode or distributed.
        UncoveredParameterError: If the optimizer holds parameters that are not the model's.
    """
    if not module.training:
        raise UnsupportedModelError(
            f"module {type(module).__name__} is in evaluation mode. Call module.train() before making it private."
        )
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UnsupportedModelError(
            f"module {type(module).__name__}: training on several devices is not supported. Pass the model inside it."
        )
    own = {id(p) for p in module.parameters()}
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if strange:
        raise UncoveredParameterError(
            f"optimizer holds {len(strange)} parameter(s) that are not the module's (the first has shape "
            f"{tuple(strange[0].shape)}). Build the optimizer from module.parameters()."
        )
