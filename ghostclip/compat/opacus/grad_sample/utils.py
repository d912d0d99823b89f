"""From a gradient sample mode to the facade that works in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ghostclip.clipper import GhostClipper
from ghostclip.compat.opacus.grad_sample.fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from ghostclip.errors import InvalidOptionError
from ghostclip.facade.modes import strategy_of
from ghostclip.facade.module import GradSampleHooks, GradSampleModule
from ghostclip.rules.modules import register_grad_sampler, register_norm_sampler
from ghostclip.validation.fixers.module_validator import ModuleValidator

__all__ = [
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]


def prepare_module(  # noqa: PLR0913 - Opacus's arguments
    model: nn.Module,
    grad_sample_mode: str,
    wrap_model: bool = True,  # noqa: FBT001, FBT002 - Opacus's signature
    *,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    strict: bool = True,
    force_functorch: bool = False,
    max_grad_norm: float | None = None,
) -> GradSampleModule | GradSampleHooks:
    """Attach a clipper to a model and return what stands for it.

    Args:
        model: The model.
        grad_sample_mode: A strategy, or one of Opacus's names for them.
        wrap_model: False returns a handle and leaves the model to the user.
        batch_first: Whether the leading axis of the model's inputs is the batch.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
        strict: See `GradSampleModule`.
        force_functorch: Of no effect; see `GradSampleModule`.
        max_grad_norm: C; by default an optimizer sets it, and 1 is the bound of "ghost" until then.

    Returns:
        The facade, or the handle.

    Raises:
        InvalidOptionError: If the mode is unknown or refused.
        UnsupportedModuleError: With ``strict``, if there are modules that mix samples.
    """
    strategy = strategy_of(grad_sample_mode)
    if strict:
        ModuleValidator.validate(model, strict=True)
    default = float("inf") if strategy in ("hooks", "auto", "bookkeeping") else 1.0
    clipper = GhostClipper(
        model,
        max_grad_norm=default if max_grad_norm is None else max_grad_norm,
        strategy=strategy,
        loss_reduction=loss_reduction,  # type: ignore[arg-type]  # checked there
        batch_first=batch_first,
    )
    if max_grad_norm is None:
        clipper.leave_plain_gradients()
    kind = GradSampleModule if wrap_model else GradSampleHooks
    return kind(model, strict=strict, force_functorch=force_functorch, clipper=clipper)


wrap_model = prepare_module


def get_gsm_class(grad_sample_mode: str) -> Callable[..., Any]:
    """Return what wraps a model in a mode.

    Args:
        grad_sample_mode: "hooks", "functorch", "ew" or "ghost".

    Returns:
        `GradSampleModule`, or `GradSampleModuleFastGradientClipping` for "ghost".

    Raises:
        InvalidOptionError: If the mode is unknown or refused, or has no class in Opacus (use `prepare_module`).
    """
    return _of_mode(grad_sample_mode, GradSampleModule, GradSampleModuleFastGradientClipping)


def get_hooks_class(grad_sample_mode: str) -> Callable[..., Any]:
    """Return what attaches to a model in a mode without wrapping it.

    Args:
        grad_sample_mode: "hooks", "functorch", "ew" or "ghost".

    Returns:
        `GradSampleHooks`, or `GradSampleHooksFastGradientClipping` for "ghost".

    Raises:
        InvalidOptionError: If the mode is unknown or refused, or has no class in Opacus (use `prepare_module`).
    """
    return _of_mode(grad_sample_mode, GradSampleHooks, GradSampleHooksFastGradientClipping)


def _of_mode(grad_sample_mode: str, hooks: Callable[..., Any], ghost: Callable[..., Any]) -> Callable[..., Any]:
    by_strategy = {"hooks": hooks, "ghost": ghost}
    strategy = strategy_of(grad_sample_mode)
    if strategy not in by_strategy:
        raise InvalidOptionError(
            f"grad_sample_mode={grad_sample_mode!r}: has no class of its own; use prepare_module(model, mode)."
        )
    return by_strategy[strategy]
