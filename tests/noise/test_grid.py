"""Rounding to an integer grid: the bound holds in whole numbers, whatever the gradients, and little is lost."""

from __future__ import annotations

import math

import pytest
import torch

from ghostclip.noise.exact import Grid
from tests.randomised import given, st

SHAPES = ((3, 5), (7,), ())


def sample_norm(parts):
    """The squared norm in Python's whole numbers."""
    return sum(int(value) ** 2 for part in parts for value in part.flatten().tolist())


def clipped(batch, max_grad_norm, dtype=torch.float64):
    grads = [torch.randn(batch, *shape, dtype=torch.float64).mul_(3).to(dtype) for shape in SHAPES]
    norms = torch.stack([g.double().reshape(batch, -1).norm(dim=1) for g in grads]).norm(dim=0)
    return grads, (max_grad_norm / norms).clamp(max=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.1, 3e-5, 700.0])
def test_the_sum_is_the_clipped_sum(dtype, max_grad_norm):
    grads, coef_B = clipped(9, max_grad_norm, dtype)
    grid = Grid.for_norm(max_grad_norm)
    assert grid.bound * grid.step == max_grad_norm
    for total, grad in zip(grid.quantize(grads, coef_B), grads, strict=True):
        want = torch.tensordot(coef_B, grad.double(), dims=1)
        assert total.dtype == torch.int64
        assert (grid.to_float(total, dtype=torch.float64) - want).abs().max() <= 9 * 7 * grid.step


def test_few_bits_round_and_keep_the_bound():
    """4 bits: rounding to the nearest alone would exceed the norm of 16 by the 23 coordinates' share."""
    grads, coef_B = clipped(400, 1.0)
    grid = Grid(step=2.0**-4, bound=2**4)
    norms = [sample_norm(grid.quantize([g[[b]] for g in grads], coef_B[[b]])) for b in range(400)]
    assert max(norms) <= 16**2
    nearest = [sum((g[b] * coef_B[b] / grid.step).round().square().sum() for g in grads).item() for b in range(400)]
    assert max(nearest) > 16**2
    assert sum(norm > 12**2 for norm in norms) > 300


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=6, max_size=6),
    st.floats(min_value=0, max_value=1e30),
    st.integers(3, 26),
)
def test_no_gradient_and_no_factor_breaks_the_bound(values, coef, bits):
    grads = [torch.tensor(values).view(1, 2, 3), torch.tensor(values[:2]).view(1, 2)]
    grid = Grid(step=1.5 * 2.0**-bits, bound=2**bits)
    assert sample_norm(grid.quantize(grads, torch.tensor([coef]))) <= grid.bound**2


def test_the_bound_is_met_to_the_last_step():
    """Factors that are too large, on a coarse grid where one step is an eighth of the bound."""
    grads = [torch.randn(3000, 3, dtype=torch.float64)]
    coef_B = torch.linspace(0.1, 4, 3000, dtype=torch.float64) / grads[0].norm(dim=1)
    grid = Grid(step=2.0**-3, bound=2**3)
    norms = [sample_norm(grid.quantize([grads[0][[b]]], coef_B[[b]])) for b in range(3000)]
    assert max(norms) == 64
    assert norms.count(0) > 500


def test_a_sample_over_the_bound_or_not_finite_leaves_the_others_alone():
    grads, coef_B = clipped(6, 1.0)
    grid = Grid.for_norm(1.0)
    alone = [grid.quantize([g[[b]] for g in grads], coef_B[[b]]) for b in range(6)]
    grads[0][2, 1, 1] = math.nan
    grads[1][3, 0] = math.inf
    coef_B[4] *= 50
    total = grid.quantize(grads, coef_B)
    for index, part in enumerate(total):
        assert torch.equal(part, sum(alone[b][index] for b in (0, 1, 5)))


def test_sums_do_not_depend_on_order_or_on_parts():
    grads, coef_B = clipped(10, 1.0, torch.float32)
    grid, order = Grid.for_norm(1.0), torch.randperm(10)
    whole = grid.quantize(grads, coef_B)
    shuffled = grid.quantize([g[order] for g in grads], coef_B[order])
    parts = [grid.quantize([g[cut] for g in grads], coef_B[cut]) for cut in (slice(0, 3), slice(3, 10))]
    for one, two, first, second in zip(whole, shuffled, *parts, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, first + second)
