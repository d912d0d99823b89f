"""Several uses of one parameter put together have the same sum of gradients."""

import pytest
import torch

from ghostclip.factors import Dense, Outer, Permuted, Rows, joined


def _outer(positions: int) -> Outer:
    return Outer(torch.randn(3, positions, 4).double(), torch.randn(3, positions, 5).double(), shape=(5, 4))


def _rows(positions: int) -> Rows:
    return Rows(torch.randint(0, 5, (3, positions)), torch.randn(3, positions, 4).double(), shape=(5, 4))


def _dense() -> Dense:
    return Dense(torch.randn(3, 5, 4).double())


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda: [_outer(1), _outer(3), _outer(2)], 1),
        (lambda: [_outer(2), _outer(2)], 2),
        (lambda: [_rows(2), _rows(1), _rows(3)], 1),
        (lambda: [_dense(), _dense()], 1),
        (lambda: [_dense(), _outer(1), _rows(2), _outer(1), _dense(), _outer(4)], 3),
        (lambda: [Permuted(_outer(1).transposed(), (1, 0)) for _ in range(3)], 3),
        (lambda: [_outer(0), _outer(0), _outer(1)], 1),
    ],
    ids=["outer", "two outer", "rows", "dense", "mixed", "other forms", "no positions"],
)
def test_sum_is_the_same(make, left):
    torch.manual_seed(0)
    factors = make()
    found = joined(factors)
    assert len(found) == left
    total = sum(factor.materialize() for factor in factors)
    torch.testing.assert_close(sum(factor.materialize() for factor in found), total, rtol=1e-12, atol=1e-14)
