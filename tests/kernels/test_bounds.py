"""What norms are worked out from for many layers together bounds what each of them would be bounded by alone."""

from __future__ import annotations

import pytest
import torch

from ghostclip.clipping.norms import NormSum
from ghostclip.kernels import gram_sums
from ghostclip.kernels.bounds import Product, block_norms, finished, finished_one, position_norms

SIZES = [(40, 30), (300, 500), (40, 30)]


def _factors(samples, positions, sizes, *, dtype=torch.float32):
    return [tuple(torch.randn(samples, positions, width, dtype=dtype) for width in pair) for pair in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("positions", [2, 5, 16, 33])
def test_errors_of_layers_together_cover_those_of_each(positions, dtype):
    found = [gram_sums(a, g) for a, g in _factors(3, positions, SIZES, dtype=dtype)]
    together = finished(found)
    for row, alone in zip(zip(*together, strict=True), map(finished_one, found), strict=True):
        value, error, mass, scale = row
        torch.testing.assert_close((value, mass, scale), (alone.value_N, alone.mass_N, alone.scale_N))
        assert (error >= alone.error_N * (1 - 1e-5)).all()
        # The largest sizes stand for those of each: within what the walk over pairs grows by.
        assert (error <= 3 * alone.error_N).all()


@pytest.mark.parametrize("size", [1.0, 1e-8, 1e12])
def test_norms_of_products_are_not_underestimated(size):
    """The norms of several layers at one position, squares that vanish on one side included."""
    norms, exact_B = NormSum(), torch.zeros(4, dtype=torch.float64)
    for inputs, gradients in _factors(4, 1, SIZES):
        a, g = inputs * size, gradients / (size * 1e12 if size > 1 else size)
        norms.add(Product(block_norms(a.flatten(1)), position_norms(g), (a.shape[2], g.shape[2])))
        exact_B += (a.double().flatten(1).norm(dim=1) * g.double().flatten(1).norm(dim=1)) ** 2
    norm_B = norms.norm_B().double()
    assert (norm_B >= exact_B.sqrt()).all()
    if size <= 1:
        assert (norm_B <= exact_B.sqrt() * (1 + 3e-6)).all()
