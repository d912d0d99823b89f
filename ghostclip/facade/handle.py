"""Base of the facades: their clipper under Opacus's names.

Shape legend: B samples.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from ghostclip.clipper import GhostClipper, Reduction
from ghostclip.errors import InvalidOptionError, UnsupportedError
from ghostclip.rules.registry import grad_samplers, norm_samplers
from ghostclip.validation.fixers.module_validator import ModuleValidator

# Those that a facade was made for, so that an optimizer finds the clipper of its parameters.
_IN_USE: weakref.WeakSet[GhostClipper] = weakref.WeakSet()


def clipper_of(parameters: Sequence[nn.Parameter]) -> GhostClipper:
    """Return the clipper whose facade has an optimizer's parameters."""
    wanted = {id(p) for p in parameters if p.requires_grad}
    for clipper in _IN_USE:
        if wanted & {id(p) for p in clipper.trainable_parameters()}:
            return clipper
    raise InvalidOptionError(
        "optimizer: no GradSampleModule holds its parameters, so nobody clips their gradients. Wrap the model first "
        "(GradSampleModule(model)), pass clipper=, or use PrivacyEngine.make_private."
    )


class ClipperHandle:
    """The part of a facade that is about clipping.

    Attributes:
        clipper: The clipper, or None in a copy of a facade.
        GRAD_SAMPLERS: Registered samplers of gradients by module class.
        NORM_SAMPLERS: Registered samplers of norms by module class.
    """

    clipper: GhostClipper | None
    _hooks_enabled = True
    GRAD_SAMPLERS = grad_samplers()
    NORM_SAMPLERS = norm_samplers()

    @property
    def batch_first(self) -> bool:
        """Whether the leading axis of the model's inputs is the batch; a copy, which has no clipper, does not say."""
        return self._attached().batch_first

    @property
    def loss_reduction(self) -> str:
        """The declared reduction of the loss, "mean" or "sum"; a copy, which has no clipper, does not say."""
        return self._attached().loss_reduction

    @property
    def max_grad_norm(self) -> float:
        """C, which the clip policy holds."""
        return self._attached().max_grad_norm

    @property
    def per_sample_gradient_norms(self) -> torch.Tensor:
        """Norm of every sample's whole gradient in the last backward, `[B]`. Not private."""
        return self._attached().per_sample_norms

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped."""
        return list(self._attached().trainable_parameters())

    @property
    def hooks_enabled(self) -> bool:
        """What `disable_hooks()` or `enable_hooks()` has said last; gradients are clipped until `remove_hooks()`."""
        return self._hooks_enabled and self.clipper is not None and self.clipper.attached

    def get_norm_sample(self) -> torch.Tensor:
        """Return the norms of the last backward.

        Returns:
            Shape `[B]`. Not private.
        """
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> torch.Tensor:
        """Return the share that the last backward kept of every sample's gradient.

        Returns:
            Shape `[B]`, or `[B, groups]`. Not private.
        """
        return self._attached().clip_coefficients

    def remove_hooks(self) -> None:
        """Detach the clipper from the model."""
        if self.clipper is not None:
            _IN_USE.discard(self.clipper)
            self.clipper.remove()

    def cleanup(self) -> None:
        """Detach the clipper from the model."""
        self.remove_hooks()

    def set_grad_sample_to_none(self) -> None:
        """Drop the per-sample gradients of the last backward; the clipped sums stay."""
        for p in self._attached().trainable_parameters():
            p.grad_sample = None  # type: ignore[attr-defined]

    def del_grad_sample(self) -> None:
        """Take the attribute `grad_sample` off the parameters; the clipped sums stay."""
        for p in self._attached().trainable_parameters():
            if hasattr(p, "grad_sample"):
                del p.grad_sample

    def allow_grad_accumulation(self) -> None:
        """Nothing to allow: several backwards before a step are always possible, and accounted as what they are."""

    def forbid_grad_accumulation(self) -> None:
        """Nothing to forbid: k backwards before a step are accounted as what they are, and warned of."""

    def disable_hooks(self) -> None:
        """Warn that nothing is switched off; `hooks_enabled` is False from now on.

        Privacy:
            A gradient that is not clipped per sample never reaches a parameter while the model is private.
        """
        warnings.warn(
            "disable_hooks(): nothing is switched off. Evaluation and gradients of inputs leave no state; a backward "
            "to parameters is still clipped and counts. For gradients that are not private use to_standard_module(), "
            "or a copy of the model.",
            stacklevel=2,
        )
        self.__dict__["_hooks_enabled"] = False

    def enable_hooks(self) -> None:
        """Let `hooks_enabled` be True again; see `disable_hooks`."""
        self.__dict__["_hooks_enabled"] = True

    def add_hooks(self, *, strict: bool = True, force_functorch: bool = False) -> NoReturn:
        """Refuse to attach again: an optimizer holds on to the clipper that it was made with.

        Args:
            strict: As Opacus takes it.
            force_functorch: As Opacus takes it.

        Raises:
            InvalidOptionError: Always.
        """
        del strict, force_functorch
        raise InvalidOptionError(
            "add_hooks(): a clipper is attached once, when the model is wrapped. After remove_hooks() make the model "
            "private again: engine.make_private, or GradSampleModule(model)."
        )

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Say whether a module can be clipped as far as its class tells.

        Args:
            module: The module.

        Returns:
            False for one that mixes samples.
        """
        return not cls.validate(module)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedError]:
        """Check a model for modules that mix samples; see `ghostclip.validate` for a check that runs it.

        Args:
            module: The model.
            strict: Raise what was found instead of returning it.

        Returns:
            One error for each module that cannot be trained privately.
        """
        return ModuleValidator.validate(module, strict=strict)

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """List the modules that own trainable parameters.

        Args:
            module: The model.

        Yields:
            The modules.
        """
        for part in module.modules():
            if any(p.requires_grad for p in part.parameters(recurse=False)):
                yield part

    def _attached(self) -> GhostClipper:
        if self.clipper is None:
            # A copy of a facade is the model alone, which has no such attribute.
            raise AttributeError("batch_first, loss_reduction and clipping belong to the original, not to a copy of it")
        return self.clipper


def attached_clipper(
    m: nn.Module, clipper: GhostClipper | None, *, strict: bool, batch_first: bool, loss_reduction: Any
) -> GhostClipper:
    """Return the given clipper, or a new one that leaves per-sample gradients and clips nothing yet."""
    if clipper is None:
        if strict:
            ModuleValidator.validate(m, strict=True)
        clipper = GhostClipper(
            m,
            max_grad_norm=math.inf,
            strategy="hooks",
            loss_reduction=cast(Reduction, loss_reduction),
            batch_first=batch_first,
        )
        clipper.leave_plain_gradients()
    _IN_USE.add(clipper)
    return clipper
