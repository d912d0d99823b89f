"""Clipping for whoever hands over per-sample gradients and leaves the rest to the user."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clipped_sum(gradients: Sequence[Tensor], max_grad_norm: float) -> list[Tensor]:
    """Σ_b min(1, C/‖g_b‖)·g_b, as a user would write it."""
    norms_B = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors_B = (max_grad_norm / norms_B).clamp(max=1.0)
    return [torch.einsum("b,b...->...", factors_B, gradient) for gradient in gradients]
