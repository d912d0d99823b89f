"""The slow twin: gradients by plain autograd, of one sample or of some, without the engine.

Shape letter: B samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipping.coefficients import clip_coefficients
from ghostclip.evidence.dependence import same_randomness

# One gradient over all trainable parameters, float64, flat.
Flat = Tensor


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        model: The model.
        loss_fn: Called with the model and a batch.
        batch_size: B of the whole batch.
        axis: The batch axis.
        tolerance: Relative error up to which gradients count as the same; None for what the precision explains.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    axis: int
    tolerance: float | None = None

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, with the generators at the same place each time.

        Args:
            batch: The batch, or some of its samples.

        Returns:
            Whatever the loss function returns.
        """
        with same_randomness(self.model.parameters()):
            return self.loss_fn(self.model, batch)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def gradient(self, batch: Any) -> Flat:
        """Return the gradient of the sum of a batch's losses by plain autograd."""
        with same_randomness(self.model.parameters()):
            # Not autograd.grad: reentrant checkpointing accepts a full backward only.
            self.loss_fn(self.model, batch).sum().backward()
        return self.collect()

    def collect(self) -> Flat:
        """Return what lies in ``.grad``, and empty it."""
        parts = []
        for parameter in self.trainable:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((grad.to_dense() if grad.is_sparse else grad).detach().double().flatten().cpu())
            parameter.grad = None
        return torch.cat(parts)


@dataclass(frozen=True)
class Reference:
    """Gradients of all samples, each of its own loss alone.

    Attributes:
        grads: One for each sample.
    """

    grads: Sequence[Flat]

    @property
    def norms_B(self) -> Tensor:
        """Norm of every sample's gradient, float64."""
        return torch.stack([grad.norm() for grad in self.grads])

    def bound(self) -> float:
        """Return a clipping norm between the two middle norms: some samples are clipped and some are not."""
        ordered = self.norms_B[self.norms_B.isfinite()].sort().values
        if len(ordered) == 0 or ordered[-1] == 0:
            return 1.0
        middle = len(ordered) // 2
        return float(ordered[max(middle - 1, 0) : middle + 1].mean()) or float(ordered[-1]) / 2

    def clipped_sum(self, max_grad_norm: float) -> Flat:
        """Return the sum of the clipped gradients; a sample that is not finite contributes nothing."""
        coef_B = clip_coefficients(self.norms_B, max_grad_norm)
        total = torch.zeros_like(self.grads[0])
        for grad, coef, norm in zip(self.grads, coef_B, self.norms_B, strict=True):
            if norm.isfinite():
                total += coef * grad
        return total


def relative_error(got: Flat, want: Flat) -> float:
    """Return the relative distance of two gradients.

    Args:
        got: One.
        want: The other, whose norm is the unit; where both are zero the error is 0.

    Returns:
        A number of at least 0.
    """
    distance, unit = float((got - want).norm()), float(want.norm())
    return distance / unit if unit else (0.0 if distance == 0 else float("inf"))
