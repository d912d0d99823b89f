"""Squared norms of many factors add up without drift, whatever their types and order, and groups are asked for anew."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from ghostclip.clipping import policies
from ghostclip.clipping.bounds import PSAC, AutoS, Flat, Normalised
from ghostclip.clipping.norms import GroupNorms, NormSum
from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import Dense, Outer, SquaredNorm


def squares(count, dtype=torch.float32):
    values = torch.rand(count, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return [SquaredNorm(value_B, 1e-9 * value_B) for value_B in values]


@pytest.mark.parametrize("asked_every", [1, 7, 5000])
def test_norm_of_thousands_of_factors_is_never_too_small(asked_every):
    total, parts = NormSum(), squares(300 if asked_every == 1 else 3000)
    assert total.total() is None
    for number, part in enumerate(parts):
        total.add(part)
        if number % asked_every == 0:
            total.total()
    exact = [math.sqrt(math.fsum(part.value_B[b].item() for part in parts)) for b in range(3)]
    for got, want in zip(total.norm_B().tolist(), exact, strict=True):
        assert want <= got <= want * (1 + (1e-4 if asked_every == 1 else 2e-6))
    assert not total.imprecise_B().any()


def test_error_bounds_add_up_and_count():
    total, value_B = NormSum(), torch.ones(2)
    for _ in range(4):
        total.add(SquaredNorm(value_B, torch.tensor([0.5, 0.0])))
    assert total.norm_B().tolist() == pytest.approx([math.sqrt(6.0), 2.0], rel=1e-5)
    assert total.imprecise_B().tolist() == [True, False]


def test_squares_without_an_error_are_never_in_doubt():
    total = NormSum()
    for _ in range(3):
        total.add(SquaredNorm(torch.tensor([3.0, 0.0]), None))
    assert total.imprecise_B().tolist() == [False, False]
    assert total.norm_B().tolist() == pytest.approx([3.0, 0.0], rel=1e-5)
    total.add(SquaredNorm(torch.tensor([7.0, 0.0]), torch.tensor([9.0, 1e-30])))
    assert total.norm_B().tolist() == pytest.approx([5.0, 1e-15], rel=1e-5)
    assert total.imprecise_B().tolist() == [True, True]
    total.override(torch.tensor([1]), torch.tensor([7.0]))
    assert total.norm_B().tolist() == pytest.approx([5.0, 7.0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(1,), (3,), (1, 1), (300, 2, 40)])
def test_norms_of_blocks_are_rounded_up_and_no_further(dtype, widths):
    blocks = [torch.rand(50, width, dtype=dtype) * 10.0 ** torch.randint(-9, 9, (50, 1)) for width in widths]
    copies = [block.clone() for block in blocks]
    total, squared = NormSum(), NormSum()
    total.add_blocks(blocks)
    squared.add_blocks(blocks)
    assert squared.total() is not None
    exact = torch.cat(blocks, 1).double().square().sum(1).sqrt()
    eps = torch.finfo(dtype).eps
    for found in (total.norm_B(), squared.norm_B()):
        assert found.dtype == dtype
        assert (found.double() >= exact * (1 + 4 * eps)).all()
        assert (found.double() <= exact * (1 + 12 * eps)).all()
    assert total.norm_B() is total.norm_B(), "asked for twice, computed once"
    assert all(torch.equal(*pair) for pair in zip(blocks, copies, strict=True)), "the norms are others' too"
    total.add_blocks([torch.ones(50, 1, dtype=dtype)])
    assert (total.norm_B().double() >= (exact.square() + 1).sqrt() * (1 + 4 * eps)).all()


MIXED = (torch.float32, torch.float64)


@pytest.mark.parametrize("rule", [Flat(), AutoS(), Normalised(), PSAC()])
def test_groups_of_one_bound_are_clipped_as_each_alone(rule):
    norm_GB = list(10 * torch.rand(5, 7, generator=torch.Generator().manual_seed(1)))
    norm_GB[1][2], norm_GB[4][5] = math.nan, math.inf
    finite_B = torch.tensor([sample not in (2, 5) for sample in range(7)])
    policy = policies.per_layer(1.0, rule=rule)
    bounds = policy.layout(list("abcde")).bounds
    together = policy.coefficients(norm_GB, bounds)
    for coef_B, norm_B, bound in zip(together, norm_GB, bounds, strict=True):
        assert torch.equal(coef_B, rule.coefficients(norm_B, bound) * finite_B)
        assert (coef_B[finite_B] > 0).all()
    apart = policy.coefficients([norm_B.to(MIXED[place % 2]) for place, norm_B in enumerate(norm_GB)], bounds)
    torch.testing.assert_close(torch.stack([coef_B.float() for coef_B in apart]), torch.stack(together))


class _Ranks:
    """One of two ranks that share samples, of which the other has the same; it counts what is named."""

    dtype, device, size, is_first = torch.float64, torch.device("cpu"), 2, False

    def __init__(self, counted):
        self.counted = counted

    def is_divided(self, name):
        return name in self.counted

    def refuse_difference(self):
        raise UnsupportedModelError("different gradients")

    def add_up(self, own):
        return 2 * own


@pytest.mark.parametrize("other", [1.0, 1 + 1e-3, 0.0])
def test_gradients_that_ranks_should_have_alike_are_refused_where_they_are_not(other):
    ranks = _Ranks("a")
    ranks.add_up = lambda own: torch.cat([2 * own[:, :4], (1 + other) * own[:, 4:5], (1 + other**2) * own[:, 5:]], 1)
    total = GroupNorms({}, ranks)
    total.add_norm_of("a", Dense(torch.randn(3, 4, dtype=torch.float64)))
    total.add_norm_of("whole", Dense(torch.randn(3, 4, dtype=torch.float64)))
    with pytest.raises(UnsupportedModelError, match="different gradients") if other != 1 else nullcontext():
        total.complete(3)


PARTS = {"a": slice(3), "b": slice(3, None)}


@pytest.mark.parametrize("counted", ["", "a", "b", "ab"])
@pytest.mark.parametrize("form", ["gradients", "one position", "positions"])
def test_each_parameter_counts_on_the_rank_that_it_counts_on_however_it_was_put_together(form, counted):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes = {"gradients": (), "one position": (1,), "positions": (40,)}[form]
    left, right = draw(6, *sizes, 4), draw(6, *sizes, 5)

    def factor(part):
        return Dense(left[part]) if form == "gradients" else Outer(left[part], right[part], shape=(5, 4))

    together, apart = (GroupNorms({}, _Ranks(counted)) for _ in range(2))
    together.add_norms_of(["a", "b"], factor(slice(None)))
    for name, part in PARTS.items():
        apart.add_norm_of(name, factor(part))
    for total in (together, apart):
        total.complete(3)
    own = [
        factor(slice(3 * number, 3 * number + 3)).materialize() for number, name in enumerate("ab") if name in counted
    ]
    expected = (2 * sum(grad.flatten(1).square().sum(1) for grad in own)) ** 0.5 if own else torch.zeros(3).double()
    torch.testing.assert_close(together.norm_GB(3)[0], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(apart.norm_GB(3)[0], expected, rtol=1e-9, atol=1e-12)
