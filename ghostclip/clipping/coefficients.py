"""The clip factor, defined once.

| norm | max_grad_norm | coefficient | why |
|---|---|---|---|
| 0 | any | 1 | nothing to clip; 0/0 never arises |
| at most C | C | 1 | inside the ball |
| above C | C | C / norm, rounded down | the clipped norm must not exceed C in floating point |
| NaN or Inf | any | 0 | such a sample contributes nothing (its values are masked as well) |
| any finite | Inf | 1 | no clipping asked for |
| above 0 | 0 | 0 | everything is clipped away |
"""

import torch
from torch import Tensor


def clip_coefficients(norm_B: Tensor, max_grad_norm: float) -> Tensor:
    """Return min(1, C/‖g_b‖) for every sample, never above the true value.

    Args:
        norm_B: Per-sample gradient norms, shape ``(B,)``, float32 or float64, already rounded up.
        max_grad_norm: C, at least 0.

    Returns:
        Coefficients, shape ``(B,)``, in the norms' dtype; see the table of edge cases above.

    Privacy:
        ``coefficient · norm <= C`` holds in floating point for every sample with a finite norm, and a sample
        with a non-finite norm has coefficient 0: adding or removing one sample moves the clipped sum by at most C.

    Reference: Abadi et al. 2016 (arXiv 1607.00133), algorithm 1.
    """
    # Two roundings follow (the quotient here, the product with the gradient later).
    bound = max_grad_norm * (1 - 4 * torch.finfo(norm_B.dtype).eps)
    quotient_B = bound / norm_B.clamp(min=torch.finfo(norm_B.dtype).tiny)
    inside_B = norm_B <= max_grad_norm
    coef_B = torch.where(inside_B, torch.ones_like(norm_B), quotient_B.clamp(max=1.0))
    return torch.where(norm_B.isfinite(), coef_B, torch.zeros_like(norm_B))
