"""What norms are worked out from for many layers together bounds what each of them would be bounded by alone."""

from __future__ import annotations

import pytest
import torch

from ghostclip.clipping.norms import NormSum
from ghostclip.kernels import gram_sums
from ghostclip.kernels.bounds import Product, block_norms, finished, finished_one, position_norms, samples_joined

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


def test_drift_is_each_layer_s_own():
    """One layer whose products round all the same way does not raise the errors of the others."""
    even = torch.full((2, 32, 768), 1 / 3)
    found = [gram_sums(a, g) for a, g in [*_factors(2, 32, [(768, 768)]), (even, even.clone())]]
    together = finished(found)
    for layer, one in enumerate(found):
        torch.testing.assert_close(together.error_N[layer], finished_one(one).error_N)


def test_samples_end_to_end_are_those_of_all():
    ((a, g),) = _factors(5, 9, [(20, 10)])
    whole = gram_sums(a, g)
    parts = samples_joined([gram_sums(a[:2], g[:2]), gram_sums(a[2:], g[2:])])
    assert parts.kind == whole.kind
    for got, want in zip(finished_one(parts), finished_one(whole), strict=True):
        torch.testing.assert_close(got, want)


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


def test_samples_without_a_gradient_have_norm_zero():
    norms = NormSum()
    for a, _ in _factors(4, 1, SIZES):
        norms.add(Product(block_norms(a.flatten(1)), torch.zeros(4, 1), (a.shape[2], 7)))
    assert not norms.norm_B().any()
