"""Kernels for GPUs, written in Triton, each with a twin in plain PyTorch that gives the same values.

The functions here are complete without Triton and on every device: they use a kernel for CUDA tensors where Triton is
installed, the kernel is expected to pay and has agreed with its twin on that device, and the twin everywhere else.
`set_mode("off")`, or ``GHOSTCLIP_KERNELS=off`` in the environment, turns every kernel off; "on" uses them wherever they
can run. Configurations follow from shapes: nothing is tuned by running a kernel on live data.
"""

from typing import Final

from ghostclip.kernels import gram, noise, outer, sums
from ghostclip.kernels.gram import WORKSPACE, gram_entries, gram_levels, gram_sums, symmetric_gram
from ghostclip.kernels.noise import add_noise_
from ghostclip.kernels.outer import outer_square, square_sums, weighted_sum
from ghostclip.kernels.runtime import Twins, mode, set_mode, using
from ghostclip.kernels.sums import NormAffine, PositionSum, is_fused, layer_norm_affine, rms_norm_affine, row_square

TWINS: Final = (gram.TWINS, outer.SQUARE, outer.SUM, sums.ROW_SQUARE, sums.NORM_AFFINE, noise.TWINS)
"""Every kernel with its twin."""

__all__ = [
    "WORKSPACE",
    "TWINS",
    "NormAffine",
    "PositionSum",
    "Twins",
    "add_noise_",
    "is_fused",
    "layer_norm_affine",
    "mode",
    "outer_square",
    "rms_norm_affine",
    "row_square",
    "set_mode",
    "square_sums",
    "gram_entries",
    "gram_levels",
    "gram_sums",
    "symmetric_gram",
    "using",
    "weighted_sum",
]
