"""Norms, cross terms, clipped sums and masks of each factor against the gradients it stands for, odd sizes included."""

import itertools

import pytest
import torch

from ghostclip.factors import AtIndex, Dense, Diagonal, Outer, Permuted, Rows, Stacked, inner
from ghostclip.factors.base import square_sums

F64 = torch.float64
B = 3


def _outer(shape=(7, 5), positions=6, slots=1):
    outputs, inputs = shape[0] // slots, shape[1]
    a = torch.randn(B * slots, positions, inputs, dtype=F64)
    return Outer(a, torch.randn(B * slots, positions, outputs, dtype=F64), shape=shape, slots=slots)


def _rows(shape=(7, 5), positions=9):
    ids = torch.randint(shape[0], (B, positions))
    return Rows(ids, torch.randn(B, positions, shape[1], dtype=F64), shape=shape)


def _stacked(shape=(4, 7, 5)):
    parts = {number: _outer(shape[1:], positions=number + 1) for number in (0, 2)}
    return Stacked(parts, shape=shape, like=torch.zeros(B, 1, dtype=F64))


MATRIX = {
    "outer": _outer,
    "outer_one_position": lambda: _outer(positions=1),
    "outer_long": lambda: _outer(positions=63),
    "rows": _rows,
    "rows_once_each": lambda: _rows((7, 5), positions=1),
    "rows_seldom_repeated": lambda: Rows(
        torch.tensor([[0, 3, 1, 5, 3], [6, 2, 0, 1, 4], [2, 2, 2, 0, 1]]), torch.randn(B, 5, 5, dtype=F64), shape=(7, 5)
    ),
    "rows_always_repeated": lambda: _rows((7, 5), positions=40),
    "dense": lambda: Dense(torch.randn(B, 7, 5, dtype=F64)),
    "diagonal": lambda: Diagonal(torch.randn(B, 4, dtype=F64), axis=1),
    "placed_row": lambda: AtIndex(Dense(torch.randn(B, 5, dtype=F64)), (2,), shape=(7, 5)),
    "placed_block": lambda: AtIndex(_outer((3, 5)), (slice(2, 5),), shape=(7, 5)),
    "placed_columns": lambda: AtIndex(_outer((7, 2)), (slice(None), slice(1, 3)), shape=(7, 5)),
    "grouped": lambda: _outer((8, 5), slots=2),
    "stacked": _stacked,
    "permuted": lambda: Permuted(_outer((5, 7)), (1, 0)),
    "permuted_grouped": lambda: Permuted(_outer((8, 5), slots=2).reshaped((2, 4, 5)), (1, 2, 0)),
    "permuted_otherwise": lambda: Permuted(_outer((8, 5)).reshaped((2, 4, 5)), (1, 2, 0)),
    "rows_of_a_view": lambda: _rows((4, 10)).reshaped((4, 5, 2)),
    "rows_of_numbers": lambda: _rows((35, 1)).reshaped((7, 5)),
}


@pytest.fixture(params=MATRIX)
def factor(request):
    return MATRIX[request.param]()


def test_squared_norm(factor):
    value, error, _ = factor.sqnorm()
    expected = factor.materialize().flatten(1).square().sum(1)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    if error is not None:
        assert (error >= 0).all()
        assert (error <= 1e-10 * expected).all()


def test_clipped_sum_adds_to_what_is_there(factor):
    coef = torch.rand(B, dtype=F64)
    out = torch.randn(factor.shape, dtype=F64)
    expected = out + torch.einsum("b,b...->...", coef, factor.materialize())
    factor.add_clipped_sum_(coef, out)
    torch.testing.assert_close(out, expected)


def test_clipped_sum_replaces_what_memory_held(factor):
    coef = torch.rand(B, dtype=F64)
    out = torch.full(factor.shape, torch.nan, dtype=F64)
    factor.write_clipped_sum_(coef, out)
    torch.testing.assert_close(out, torch.einsum("b,b...->...", coef, factor.materialize()))


def test_masked_samples_are_gone_even_if_they_are_not_finite(factor):
    keep = torch.tensor([True, False, True])
    expected = factor.materialize() * keep.view(-1, *[1] * len(factor.shape))
    torch.testing.assert_close(factor.masked(keep).materialize(), expected)


def test_reshaped(factor):
    flat = factor.reshaped((factor.numel(),))
    torch.testing.assert_close(flat.materialize(), factor.materialize().flatten(1))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(MATRIX, 2)))
def test_inner_product(first, second):
    one, two = MATRIX[first](), MATRIX[second]()
    if one.shape != two.shape:
        two = one
    expected = (one.materialize() * two.materialize()).flatten(1).sum(1)
    for product in (inner(one, two), inner(two, one)):
        torch.testing.assert_close(product.value_B, expected)
        assert (product.absolute_B >= expected.abs() * (1 - 1e-12)).all()


def test_selected_samples_and_float64(factor):
    for index in (torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)):
        found = factor.selected(index).in_double()
        assert found.batch_size == len(index)
        torch.testing.assert_close(found.materialize(), factor.materialize()[index])


def test_terms_are_at_least_the_norm(factor):
    terms, whole = factor.terms(), factor.materialize().flatten(1).norm(dim=1)
    if terms is not None and not isinstance(factor, Rows):
        # Of rows, only those that a sample meets again are terms.
        assert (terms.mass_B >= whole * (1 - 1e-12)).all()
        assert (terms.scale_B * terms.number >= whole.square() * (1 - 1e-12)).all()


def test_gram_in_float32_over_estimates_what_it_cannot_resolve():
    """Two positions cancel but for 1e-4: the error bound covers what the Gram lost."""
    a = torch.randn(1, 1, 300).repeat(1, 2, 1)
    g = torch.randn(1, 1, 200).repeat(1, 2, 1)
    g[:, 1] *= -(1 - 1e-4)
    outer = Outer(a, g, shape=(200, 300))
    exact = Outer(a.double(), g.double(), shape=(200, 300)).instantiated_sqnorm().value_B
    value, error, _ = outer.gram_sqnorm()
    assert (value + error).item() >= exact.item()


def test_norm_of_a_million_values_does_not_drift():
    """A plain float32 norm is 2e-5 too small here, which would break the bound."""
    x = torch.randn(2, 1_280_001)
    exact = x.double().square().sum(1)
    assert ((square_sums(x).double() - exact).abs() / exact).max() < 1e-6
    y = x + 0.1 * torch.randn_like(x)
    exact = (x.double() * y.double()).sum(1)
    assert ((inner(Dense(x), Dense(y)).value_B.double() - exact).abs() / exact).max() < 1e-5
