"""What tests of kernels call beside them, in the process where they run.

A kernel that turns given words into normal values, as key streams do not hit the tails on demand; sums of several
matrices; a private step with kernels on.
"""

import torch
import triton
import triton.language as tl

from ghostclip import GhostClipper, kernels
from ghostclip.kernels import outer, triton_noise


@triton.jit
def _pairs(radius_ptr, angle_ptr, cosine_ptr, sine_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    radius = tl.load(radius_ptr + i).to(tl.uint64, bitcast=True)
    cosine, sine = triton_noise.normal_pair(radius, tl.load(angle_ptr + i).to(tl.uint64, bitcast=True))
    tl.store(cosine_ptr + i, cosine)
    tl.store(sine_ptr + i, sine)


def normal_pair(radius: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two normal values for each pair of int64 words; a power of two of them."""
    cosine, sine = torch.empty(2, radius.numel(), dtype=torch.float64, device=radius.device)
    _pairs[(1,)](radius, angle, cosine, sine, N=radius.numel())
    return cosine, sine


def several_sums(
    a_NTI: torch.Tensor,
    g_NTO: torch.Tensor,
    coef_B: torch.Tensor,
    out_SOI: torch.Tensor,
    *,
    side_by_side: bool,
    fresh: bool,
) -> torch.Tensor:
    """Several matrices that one launch adds to."""
    with kernels.using("on"):
        assert outer.sums_by_kernel(a_NTI, g_NTO, coef_B, out_SOI, side_by_side=side_by_side, fresh=fresh)
    return out_SOI


def clipped_sums(strategy: str, dtype: torch.dtype, mode: str) -> tuple[torch.Tensor, ...]:
    """Inputs, weights and clipped sums of small layers of all kinds that kernels know."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 24),
        torch.nn.LayerNorm(24),
        torch.nn.Linear(24, 40),
        torch.nn.Linear(40, 24),
        torch.nn.Unflatten(1, (20, 1)),
        torch.nn.Flatten(2),
        torch.nn.Conv1d(20, 20, 3, groups=2),
    ).to(dtype)
    ids_BT = torch.randint(7, (4, 20))
    clipper = GhostClipper(model, max_grad_norm=0.3, strategy=strategy)
    with kernels.using(mode):
        clipper.backward(model(ids_BT).float().square().sum((1, 2)))
    sums = [parameter.grad.detach().clone() for parameter in model.parameters()]
    return ids_BT, *(parameter.detach() for parameter in model.parameters()), *sums


FUNCTIONS = {"normal_pair": normal_pair, "several sums": several_sums, "clipped_sums": clipped_sums}
