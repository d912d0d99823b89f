"""Opacus's names for a model that is clipped without per-sample gradients: the two strategies of two backwards."""

from __future__ import annotations

from typing import cast

from torch import nn

from ghostclip.clipper import GhostClipper, Reduction
from ghostclip.compat.opacus.described import Described
from ghostclip.facade.module import GradSampleHooks, GradSampleModule
from ghostclip.validation.fixers.module_validator import ModuleValidator

_TWO_PASSES = ("ghost", "fast")


class GradSampleModuleFastGradientClipping(GradSampleModule, metaclass=Described):
    """A `GradSampleModule` whose clipper takes two backwards; train it with `DPLossFastGradientClipping`.

    Args:
        m: The model.
        batch_first: Whether the leading axis of the model's inputs is the batch.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
        strict: See `GradSampleModule`.
        force_functorch: Of no effect; see `GradSampleModule`.
        max_grad_norm: C.
        use_ghost_clipping: Norms without per-sample gradients ("ghost"), or with those of one layer at a time ("fast").
    """

    def __init__(  # noqa: PLR0913 - Opacus's arguments
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ) -> None:
        if strict:
            ModuleValidator.validate(m, strict=True)
        clipper = _clipper(m, max_grad_norm, batch_first, loss_reduction, ghost=use_ghost_clipping)
        super().__init__(m, strict=strict, force_functorch=force_functorch, clipper=clipper)

    @classmethod
    def describes(cls, module: GradSampleModule) -> bool:
        """Say whether a facade is one of two backwards.

        Args:
            module: The facade.

        Returns:
            True if so.
        """
        return _takes_two_passes(module.clipper)


class GradSampleHooksFastGradientClipping(GradSampleHooks, metaclass=Described):
    """As `GradSampleModuleFastGradientClipping`, without wrapping the model.

    Args:
        m: The model.
        batch_first: Whether the leading axis of the model's inputs is the batch.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
        strict: See `GradSampleModule`.
        force_functorch: Of no effect; see `GradSampleModule`.
        max_grad_norm: C.
        use_ghost_clipping: "ghost" or "fast".
    """

    def __init__(  # noqa: PLR0913 - Opacus's arguments
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ) -> None:
        if strict:
            ModuleValidator.validate(m, strict=True)
        clipper = _clipper(m, max_grad_norm, batch_first, loss_reduction, ghost=use_ghost_clipping)
        super().__init__(m, strict=strict, force_functorch=force_functorch, clipper=clipper)

    @classmethod
    def describes(cls, hooks: GradSampleHooks) -> bool:
        """Say whether a handle is of a clipper of two backwards.

        Args:
            hooks: The handle.

        Returns:
            True if so.
        """
        return _takes_two_passes(hooks.clipper)


def _takes_two_passes(clipper: GhostClipper | None) -> bool:
    return clipper is not None and clipper.strategy in _TWO_PASSES


def _clipper(m: nn.Module, bound: float, batch_first: bool, loss_reduction: str, *, ghost: bool) -> GhostClipper:  # noqa: FBT001
    return GhostClipper(
        m,
        max_grad_norm=bound,
        strategy="ghost" if ghost else "fast",
        loss_reduction=cast(Reduction, loss_reduction),
        batch_first=batch_first,
    )
