"""Products of 16-bit factors on matrix units: no norm is too small, no sum is off, whatever the data have in common."""

from __future__ import annotations

import pytest
import torch

from ghostclip import GhostClipper
from ghostclip.factors import Outer
from ghostclip.kernels import gram, products
from tests.kernels.units import AMPERE, HOPPER

DTYPES = [torch.bfloat16, torch.float16]


def _random(samples, positions, inputs, outputs):
    return torch.randn(samples, positions, inputs), torch.randn(samples, positions, outputs)


def _constant(samples, positions, inputs, outputs):
    return torch.full((samples, positions, inputs), 1.1), torch.full((samples, positions, outputs), 0.7)


def _common_part(samples, positions, inputs, outputs):
    """Inputs that share a part, gradients that cancel but for a few hundredths."""
    a = 1.3 + torch.randn(samples, positions, inputs) / 50
    sign = 1 - 2 * (torch.arange(positions) % 2).view(1, -1, 1)
    return a, sign * (0.9 + torch.randn(samples, positions, outputs) / 8)


def _rounded_away(samples, positions, inputs, outputs):
    """Terms whose squares, after those of the first step, are each just under what a sum keeps."""
    a = torch.full((samples, positions, inputs), 2.0**-12 * 0.99)
    a[:, :, :16] = 1.0
    return a, torch.randn(samples, positions, outputs)


DATA = [_random, _constant, _common_part, _rounded_away]


def _exact(a_NTI, g_NTO):
    return torch.bmm(g_NTO.double().mT, a_NTI.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("positions", [2, 7, 64, 130])
@pytest.mark.parametrize("form", ["gram_sqnorm", "instantiated_sqnorm"])
@pytest.mark.parametrize("kind", [HOPPER, AMPERE])
def test_norms_are_not_underestimated(units, dtype, data, positions, form, kind):
    torch.manual_seed(0)
    units.kind = kind
    a, g = (x.to(dtype) for x in data(3, positions, 272, 40))
    outer = Outer(a, g, shape=(40, 272))
    found = getattr(outer, form)()
    assert units.calls
    exact_B = _exact(a, g).square().sum((1, 2))
    assert (found.value_B.double() + found.error_B.double() >= exact_B).all()
    if data is _random:
        assert (found.error_B <= 2e-4 * found.value_B).all()


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind", [HOPPER, AMPERE])
def test_long_sums_are_cut_into_chains(units, data, kind):
    """Of 6,000 features and positions, none in more than 256 steps."""
    units.kind = kind
    torch.manual_seed(0)
    a, g = (x.to(torch.bfloat16) for x in data(1, 2, 6000, 4))
    assert_covered(Outer(a, g, shape=(4, 6000)).gram_sqnorm(), a, g)
    a, g = (x.to(torch.bfloat16) for x in data(1, 6000, 20, 4))
    assert_covered(Outer(a, g, shape=(4, 20)).instantiated_sqnorm(), a, g)


def assert_covered(found, a, g):
    exact_B = _exact(a, g).square().sum((1, 2))
    assert (found.value_B.double() + found.error_B.double() >= exact_B).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("positions", "fresh", "sizes"), [(2, False, (40, 17)), (30, True, (17, 40)), (600, False, (17, 40))]
)
def test_weighted_sums(units, dtype, positions, fresh, sizes):
    """Right to 2^-16 of each term, as the terms' norms say; coefficients and gradients of any size."""
    torch.manual_seed(0)
    inputs, outputs = sizes
    a, g = (x.to(dtype) for x in _random(5, positions, inputs, outputs))
    coef = torch.tensor([1.0, 1 / 3, 7e-6, 300.0, 0.0])
    before = torch.full((outputs, inputs), float("nan")) if fresh else torch.randn(outputs, inputs)
    outer, out = Outer(a, g, shape=(outputs, inputs)), before.clone()
    (outer.write_clipped_sum_ if fresh else outer.add_clipped_sum_)(coef, out)
    assert units.calls
    exact = (_exact(a, g) * coef.double().view(-1, 1, 1)).sum(0) + (0 if fresh else before.double())
    terms = outer.terms()
    most = (2.0**-24 * coef * terms.mass_B).sum() + 1e-5 * exact.norm()
    assert (out.double() - exact).norm() <= most
    assert terms.by_units


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_slots(units, dtype):
    a, g = (x.to(dtype) for x in _random(6, 9, 8, 5))
    outer = Outer(a, g, shape=(3, 5, 8), slots=3)
    out = torch.zeros(3, 5, 8)
    coef = torch.tensor([0.5, 2.0])
    outer.add_clipped_sum_(coef, out)
    exact = (_exact(a, g).view(2, 3, 5, 8) * coef.double().view(2, 1, 1, 1)).sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert units.calls


def test_small_and_large_numbers_of_float16_are_weighted_in_float32(units):
    """Coefficients that would bring a weighted term beyond float16, or below."""
    a, g = torch.full((2, 4, 8), 2.0**10).half(), torch.full((2, 4, 8), 2.0**-14).half()
    outer, out = Outer(a, g, shape=(8, 8)), torch.zeros(8, 8)
    outer.add_clipped_sum_(torch.tensor([2.0**-20, 2.0**20]), out)
    exact = (_exact(a, g) * torch.tensor([2.0**-20, 2.0**20]).double().view(2, 1, 1)).sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "fast"])
@pytest.mark.parametrize("data", ["random", "constant"])
def test_no_sample_passes_the_bound(units, strategy, data):
    """A bfloat16 model: what is left out of the sum when a sample is left out has a norm of at most C."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 48)).bfloat16()
    x = torch.randn(4, 12, 64) if data == "random" else torch.full((4, 12, 64), 1.1)
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
    clipper.withhold_gradients()

    def run(keep):
        clipper.reset()
        clipper.backward(1e3 * model(x[keep].bfloat16()).float().square().sum((1, 2)))
        return [clipper.summed_gradient(p).double().clone() for p in model.parameters()]

    whole = run([0, 1, 2, 3])
    assert units.calls
    for i in range(4):
        rest = run([j for j in range(4) if j != i])
        moved = sum((one - other).square().sum() for one, other in zip(whole, rest, strict=True)).sqrt()
        assert moved <= 1 + 2e-5
        assert moved >= 1 - 2e-3


def _convolution(dtype, *, groups, kernel, stride):
    from ghostclip.factors import Windows
    from ghostclip.factors.convolution import Geometry

    shape = torch.Size((6, 8 // groups, kernel, kernel))
    padding = ((kernel // 2, kernel // 2),) * 2
    geometry = Geometry(shape, (stride,) * 2, padding, (1, 1), groups)
    x, g = torch.randn(3, 1, 8, 10, 10), torch.randn(3, 1, 6, -(-10 // stride), -(-10 // stride))
    return Windows(x.to(dtype), g.to(dtype), geometry)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1)])
def test_convolutions(units, dtype, groups, kernel, stride):
    """Norms in each form, gradients and weighted sums, against the same numbers in float64."""
    torch.manual_seed(0)
    windows = _convolution(dtype, groups=groups, kernel=kernel, stride=stride)
    exact = windows.in_double().materialize()
    exact_B = exact.flatten(1).square().sum(1)
    forms = [windows.instantiated_sqnorm, windows.gram_sqnorm, *([windows.pixel_sqnorm] if stride == 1 else [])]
    for form in forms:
        units.calls = 0
        found = form()
        assert units.calls
        assert (found.value_B + found.error_B >= exact_B).all()
        assert (found.error_B <= 1e-3 * found.value_B).all()
        assert found.terms.by_units
    torch.testing.assert_close(windows.materialize().double(), exact, rtol=1e-5, atol=1e-4)
    coef = torch.tensor([0.5, 2.0, 0.0])
    for start in (0.0, 1.0):
        out = torch.full(windows.shape, start)
        (windows.add_clipped_sum_ if start else windows.write_clipped_sum_)(coef, out)
        wanted = (exact * coef.double().view(-1, 1, 1, 1, 1)).sum(0) + start
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("positions", [256, 300, 513])
def test_grams_in_halves(units, monkeypatch, positions):
    """As much work as is worth it: blocks on and above the diagonal, and what is left over."""
    monkeypatch.setattr(gram, "UNDIVIDED", 10)
    gram.gram_levels.cache_clear()
    try:
        assert gram.gram_levels(positions, 13, 11, by_units=True) > 0
        torch.manual_seed(0)
        a, g = (x.to(torch.bfloat16) for x in _random(2, positions, 13, 11))
        found = Outer(a, g, shape=(11, 13)).gram_sqnorm()
    finally:
        gram.gram_levels.cache_clear()
    assert_covered(found, a, g)
    assert (found.error_B <= 3e-4 * found.value_B).all()
    torch.testing.assert_close(found.value_B.double(), _exact(a, g).square().sum((1, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("positions", [30, 150])
def test_sums_where_torch_cannot_add_into_float32(units, monkeypatch, positions):
    """Torch before 2.10: a product of its own is added then."""
    monkeypatch.setattr(products, "_ADDS", False)
    monkeypatch.setattr(products, "UNIT_CHAIN", 64)
    torch.manual_seed(0)
    a, g = (x.to(torch.bfloat16) for x in _random(3, positions, 100, 12))
    outer, out = Outer(a, g, shape=(12, 100)), torch.ones(12, 100)
    coef = torch.tensor([0.3, 1.0, 2.0])
    outer.add_clipped_sum_(coef, out)
    torch.testing.assert_close(
        out.double(), 1 + (_exact(a, g) * coef.double().view(-1, 1, 1)).sum(0), rtol=1e-4, atol=2e-3
    )
    assert_covered(outer.gram_sqnorm(), a, g)
    assert_covered(outer.instantiated_sqnorm(), a, g)
