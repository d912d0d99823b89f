"""Continuous Gaussian values from uniform bits, in float64."""

from __future__ import annotations

import math

import torch


def box_muller(words_W: torch.Tensor) -> torch.Tensor:
    """Turn uniform int64 bits into normal values, float64, in place: √(-2 log u)·(cos, sin)(2πv), at most 9.42.

    Reference:
        Box and Muller (1958), A note on the generation of random normal deviates.
    """
    radius_N, angle_N = words_W.chunk(2)
    # (k + 1/2) / 2^63 for a uniform 63-bit k: never 0, and exact where it is small, which is where the tails are.
    uniform_N = radius_N.bitwise_and_(2**63 - 1).to(torch.float64).add_(0.5).mul_(2.0**-63)
    radius_N = uniform_N.log_().mul_(-2).sqrt_()
    angle_N = angle_N.to(torch.float64).mul_(math.pi * 2.0**-63)
    return torch.cat((angle_N.cos().mul_(radius_N), angle_N.sin_().mul_(radius_N)))
