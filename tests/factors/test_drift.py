"""Sums of equal values round all the same way: norms of constant inputs and gradients must not come out too small."""

import pytest
import torch

from ghostclip.clipping.bounds import clip_coefficients
from ghostclip.clipping.norms import NormSum
from ghostclip.factors import Dense, Outer


@pytest.mark.parametrize("positions", [1, 2, 3, 8, 10, 16])
@pytest.mark.parametrize("sizes", [(256, 256), (768, 3072), (4096, 4096), (4096, 4), (8192, 4)])
@pytest.mark.parametrize("value", [1.1, 1.3, 0.7, 1 / 3])
def test_constant_inputs_are_not_underestimated(positions, sizes, value):
    """The norm, rounded up as it is before clipping, against float64, and against the sum that is released."""
    inputs, outputs = sizes
    a_NTI, g_NTO = torch.full((1, positions, inputs), value), torch.full((1, positions, outputs), 0.3)
    outer = Outer(a_NTI, g_NTO, shape=(outputs, inputs))
    norms = NormSum()
    norms.add(outer.gram_sqnorm() if positions > 1 else outer.sqnorm())
    bound = norms.norm_B().double().item()
    # All positions are alike: the gradient is one outer product times their number.
    exact = positions * a_NTI[0, 0].double().norm().item() * g_NTO[0, 0].double().norm().item()
    assert bound >= exact
    assert bound <= exact * (1 + 1e-4)
    released = torch.zeros(outputs, inputs)
    outer.add_clipped_sum_(torch.ones(1), released)
    assert released.double().norm().item() <= bound


def _rounded_away(size, lanes):
    """Return a vector whose terms after the first, squared, are each just under half a last place of the sum."""
    block = torch.full((256,), (0.49 * 2.0**-23) ** 0.5)
    block[:lanes] = 1.0
    return block.repeat(size // 256)


@pytest.mark.parametrize("positions", [1, 2, 8])
@pytest.mark.parametrize("size", [256, 1024, 2048])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16, 32])
def test_terms_that_are_rounded_away_do_not_pass_the_bound(positions, size, lanes):
    """The worst order of terms that is known: what is released, and what it stands for, is within 1e-5 of it."""
    row = _rounded_away(size, lanes)
    x_NTI = row.expand(1, positions, size).contiguous()
    outer = Outer(x_NTI, x_NTI.clone(), shape=(size, size))
    norms = NormSum()
    norms.add(outer.gram_sqnorm() if positions > 1 else outer.sqnorm())
    coef_B = clip_coefficients(norms.norm_B(), 0.5)
    exact = positions * row.double().square().sum().item()
    assert coef_B.double().item() * exact <= 0.5 * (1 + 1e-5)
    released = torch.zeros(size, size)
    outer.add_clipped_sum_(coef_B, released)
    assert released.double().norm().item() <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 400, 514, 8192, 65_537, 1_000_000])
@pytest.mark.parametrize("value", [1.1, 1 / 3])
@pytest.mark.parametrize("layout", ["rows", "columns", "one value"])
def test_norms_of_equal_values_are_not_underestimated(size, value, layout):
    """Blocks come out even for some sizes and leave a rest for others; both within what a norm is rounded up by."""
    rows = torch.full((2, size), value)
    dense = Dense({"rows": rows, "columns": rows.T.contiguous().T, "one value": rows[:, :1].expand(2, size)}[layout])
    norms = NormSum()
    norms.add_blocks(dense.block_norms())
    exact = size**0.5 * torch.tensor(value).double().item()
    for bound in norms.norm_B().double().tolist():
        assert exact <= bound <= exact * (1 + 3e-6)
