"""A kernel that turns given words into normal values: key streams do not hit the tails on demand.

And how often the kernel of noise is started.
"""

from unittest import mock

import torch
import triton
import triton.language as tl

from ghostclip.kernels._compiled import noise


@triton.jit
def _pairs(radius_ptr, angle_ptr, cosine_ptr, sine_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    radius = tl.load(radius_ptr + i).to(tl.uint64, bitcast=True)
    cosine, sine = noise.normal_pair(radius, tl.load(angle_ptr + i).to(tl.uint64, bitcast=True))
    tl.store(cosine_ptr + i, cosine)
    tl.store(sine_ptr + i, sine)


def normal_pair(radius: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two normal values for each pair of int64 words; a power of two of them."""
    cosine, sine = torch.empty(2, radius.numel(), dtype=torch.float64, device=radius.device)
    _pairs[(1,)](radius, angle, cosine, sine, N=radius.numel())
    return cosine, sine


def noise_launches(count: int) -> int:
    """How many kernels add noise to a tensor of so many elements."""
    tensor = torch.empty(1).expand(count)
    with mock.patch.object(noise, "_add_noise", mock.MagicMock()) as kernel:
        noise.add_noise(tensor, [0] * 16, (1.0, 2.0), (0, count), (1 << 15, 8))
    # Each block of noise is in one grid.
    assert sum(grid[0] for (grid,), _ in kernel.__getitem__.call_args_list) == -(-count // (1 << 15))
    return kernel.__getitem__.return_value.call_count
