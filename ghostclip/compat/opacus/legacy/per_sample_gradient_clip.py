"""Clipping by hand, without an optimizer: a norm clipper says how, `PerSampleGradientClipper` does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from ghostclip.clipper import GhostClipper, Reduction
from ghostclip.clipping import policies
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.errors import MissingGradientError

NormClipper = ClipPolicy
"""What is done to every sample's gradient; see `ghostclip.clipping.policies`."""


def ConstantFlatClipper(flat_value: float) -> ClipPolicy:  # noqa: N802 - Opacus's name
    """Return clipping of every sample's whole gradient to one bound.

    Args:
        flat_value: C.

    Returns:
        The policy.
    """
    return policies.flat(flat_value)


def ConstantPerLayerClipper(flat_values: Sequence[float]) -> ClipPolicy:  # noqa: N802 - Opacus's name
    """Return clipping of every parameter's gradient by itself.

    Args:
        flat_values: One bound for each trainable parameter, in the model's order.

    Returns:
        The policy.
    """
    return policies.per_layer(flat_values)


class PerSampleGradientClipper:
    """Clips every sample's gradient in each backward; what an optimizer finds in `p.grad` is their sum, or mean.

    Privacy:
        The sum's sensitivity is √(Σ thresholds²). No noise is added here.

    Args:
        module: The model.
        norm_clipper: How samples are clipped.
        batch_first: Whether the leading axis of the model's inputs is the batch.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
    """

    def __init__(
        self,
        module: nn.Module,
        norm_clipper: ClipPolicy,
        batch_first: bool = True,  # noqa: FBT001, FBT002 - Opacus's signature
        loss_reduction: str = "mean",
    ) -> None:
        self.module = module
        self.norm_clipper = norm_clipper
        self.clipper = GhostClipper(
            module,
            policy=norm_clipper,
            strategy="hooks",
            loss_reduction=cast(Reduction, loss_reduction),
            batch_first=batch_first,
        )
        self._samples = 0
        self._passes = 0

    def clip_and_accumulate(self) -> None:
        """Take note of a backward, which has clipped and added up already.

        Raises:
            MissingGradientError: If there was none since the last call.
        """
        if self.clipper.backward_passes == self._passes:
            raise MissingGradientError("clip_and_accumulate(): no backward since the last one. Call loss.backward().")
        self._passes = self.clipper.backward_passes
        self._samples += self.clipper.batch_size

    def pre_step(self) -> tuple[list[float], int]:
        """Close the batch: `p.grad` becomes the clipped sum, or its mean over the samples if the loss is one.

        Returns:
            (bounds of the clip groups, samples that were accumulated).

        Raises:
            MissingGradientError: If there was no backward.
        """
        if self.clipper.backward_passes > self._passes:
            self.clip_and_accumulate()
        if not self._passes:
            raise MissingGradientError("pre_step(): nothing was clipped. Call loss.backward() on the model first.")
        parameters = self.clipper.trainable_parameters()
        sums = [self.clipper.summed_gradient(p) for p in parameters]
        samples, divisor = self._samples, max(1, self._samples) if self.clipper.loss_reduction == "mean" else 1
        self.zero_grad()
        for p, total in zip(parameters, sums, strict=True):
            p.grad = None if total is None else (total / divisor).to(p.dtype)
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return list(self.norm_clipper.layout(names).bounds), samples

    def zero_grad(self) -> None:
        """Forget the sums and the per-sample gradients."""
        self._samples = self._passes = 0
        self.clipper.reset()

    def close(self) -> None:
        """Detach from the model."""
        self.clipper.remove()
