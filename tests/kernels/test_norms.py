"""Kernels of norms and sums against their definition in float64: odd sizes, all types, memory that starts as NaN."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# N, T, I, O: one tile or several, an odd and an even number of them, sizes that fill no tile.
SIZES = [(1, 2, 5, 3), (2, 63, 60, 33), (1, 70, 17, 65), (3, 16, 4, 4), (1, 150, 9, 7), (1, 20, 70, 1)]
EMPTY = [(0, 5, 4, 3), (2, 0, 4, 3)]
NORMS = ["symmetric_gram", "outer_square"]
# The largest error seen is 4e-7; a missing or doubled row changes a norm by 1e-2.
TOLERANCE = 3e-6
# Matrix units of an H100 truncate: 1e-5 of a sum of 4,200 products. A missing row changes that by 2e-4.
TOLERANCE_OF_UNITS = 5e-5


def _factors(size, dtype=torch.float32):
    n, t, i, o = size
    return torch.randn(n, t, i).to(dtype), torch.randn(n, t, o).to(dtype)


def _gradients(a, g):
    return torch.einsum("nti,nto->noi", a.double(), g.double())


def _close(got, wanted, tolerance=TOLERANCE):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def _covers(norm, exact, dtype=torch.float32, tolerance=TOLERANCE):
    """The value is right, and the bound makes up for its rounding, or that of matrix units, without being much more."""
    _close(norm.value_N, exact, tolerance)
    assert (norm.value_N.double() + norm.error_N.double() >= exact).all()
    assert (norm.error_N >= 0).all()
    assert (norm.error_N.double() <= (1e-5 if dtype == torch.float32 else 1e-3) * exact).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norm(fast, name, size, dtype):
    a, g = _factors(size, dtype)
    _covers(fast(name, a, g, 1), _gradients(a, g).square().sum((1, 2)), dtype)


@pytest.mark.parametrize("programs", [2, 6])
@pytest.mark.parametrize("name", NORMS)
def test_norm_by_few_programs(fast, name, programs):
    """A program of a GPU goes through several tiles where there are many samples."""
    a, g = _factors((2, 200, 17, 130))
    _covers(fast(name, a, g, 1, programs=programs), _gradients(a, g).square().sum((1, 2)))


@pytest.mark.parametrize("name", NORMS)
def test_sums_longer_than_a_chunk(fast, name, request):
    a, g = _factors((1, 600, 5, 3) if name == "outer_square" else (1, 5, 1100, 600))
    _covers(fast(name, a, g, 1), _gradients(a, g).square().sum((1, 2)))
    tolerance = TOLERANCE if request.node.callspec.params["fast"] == "cpu" else TOLERANCE_OF_UNITS
    a, g = _factors((1, 4200, 5, 3) if name == "outer_square" else (1, 5, 4200, 60), torch.bfloat16)
    _covers(fast(name, a, g, 1), _gradients(a, g).square().sum((1, 2)), torch.bfloat16, tolerance)


@pytest.mark.parametrize("name", NORMS)
def test_mixed_types_and_strides(fast, name):
    a, g = _factors((2, 33, 8, 20), torch.bfloat16)
    a, g = a.float().mT.contiguous().mT, g[:, :, ::2]
    _covers(fast(name, a, g, 1), _gradients(a, g).square().sum((1, 2)), torch.bfloat16)


@pytest.mark.parametrize("name", [*NORMS, "weighted_sum"])
def test_rows_that_begin_at_odd_places_are_copied_a_few_samples_at_a_time(fast, name):
    """As of a vocabulary of 50,257: what is copied stays within the workspace."""
    a, g = _factors((3, 17, 20, 1025), torch.bfloat16)
    exact = _gradients(a, g)
    if name == "weighted_sum":
        coef, out = torch.rand(3), torch.randn(1025, 20)
        wanted = out.double() + torch.einsum("n,noi->oi", coef.double(), exact)
        _close(fast(name, a, g, coef, out, workspace=20_000), wanted)
    else:
        _covers(fast(name, a, g, 1, workspace=20_000), exact.square().sum((1, 2)), torch.bfloat16)


@pytest.mark.parametrize("name", [*NORMS, "weighted_sum"])
def test_large_tiles(fast, name):
    """Of 128 rows, the last of which are filled with nothing."""
    a, g = _factors((2, 200, 150, 130), torch.bfloat16)
    exact = _gradients(a, g)
    if name == "weighted_sum":
        coef = torch.rand(2)
        found = fast(name, a, g, coef, torch.full((130, 150), torch.nan), fresh=True, enough=1)
        _close(found, torch.einsum("n,noi->oi", coef.double(), exact))
    else:
        _covers(fast(name, a, g, 1, enough=1), exact.square().sum((1, 2)), torch.bfloat16)


@pytest.mark.parametrize("size", EMPTY, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_nothing_has_norm_zero(fast, name, size):
    norm = fast(name, *_factors(size), 1)
    assert norm.value_N.tolist() == norm.error_N.tolist() == [0.0] * size[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_bound_covers_what_cancels(fast, name, dtype):
    """Two positions cancel but for a little: the bound is larger than what the value lost."""
    a = torch.randn(2, 1, 60).repeat(1, 2, 1).to(dtype)
    g = torch.randn(2, 1, 50).repeat(1, 2, 1)
    g[:, 1] *= -(1 - 1e-4)
    g = g.to(dtype)
    value, error = fast(name, a, g, 1)[:2]
    exact = _gradients(a, g).square().sum((1, 2))
    assert (value.double() + error.double() >= exact).all()
    assert (error > 0).all()


@pytest.mark.parametrize("name", NORMS)
def test_a_sample_that_is_not_finite_stays_alone(fast, name):
    a, g = _factors((3, 20, 6, 5))
    exact = _gradients(a, g).square().sum((1, 2))
    g[1, 3, 2] = float("inf")
    value = fast(name, a, g, 1).value_N
    assert not torch.isfinite(value[1])
    _close(value[[0, 2]], exact[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weighted_sum_adds_to_what_is_there(fast, size, dtype):
    a, g = _factors(size, dtype)
    coef, out = torch.rand(size[0]), torch.randn(size[3], size[2])
    coef[0] = 0.5
    expected = out.double() + torch.einsum("n,noi->oi", coef.double(), _gradients(a, g))
    _close(fast("weighted_sum", a, g, coef, out), expected)


@pytest.mark.parametrize("programs", [1, 4])
def test_weighted_sum_in_parts_adds_or_replaces_what_memory_held(fast, programs):
    a, g = _factors((5, 18, 70, 3))
    coef, out = torch.rand(5), torch.randn(3, 70)
    expected = torch.einsum("n,noi->oi", coef.double(), _gradients(a, g))
    _close(fast("weighted_sum", a, g, coef, torch.full((3, 70), torch.nan), programs=programs, fresh=True), expected)
    _close(fast("weighted_sum", a, g, coef, out.clone(), programs=programs), out.double() + expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fresh", "side_by_side", "programs"), [(False, True, 1), (True, False, 40)])
def test_several_weighted_sums(fast, dtype, fresh, side_by_side, programs):
    """Of layers of one shape, or of the slots of every sample, in one launch."""
    a, g = _factors((6, 33, 20, 17), dtype)
    coef, out = torch.rand(3), torch.randn(2, 17, 20)
    exact = _gradients(a, g).unflatten(0, (3, 2) if side_by_side else (2, 3))
    exact = exact if side_by_side else exact.transpose(0, 1)
    wanted = torch.einsum("b,bsoi->soi", coef.double(), exact) + (0 if fresh else out.double())
    found = fast("several sums", a, g, coef, out, fresh=fresh, side_by_side=side_by_side, programs=programs)
    _close(found, wanted)


@pytest.mark.parametrize("size", EMPTY, ids=str)
def test_weighted_sum_of_nothing(fast, size):
    assert not fast(
        "weighted_sum", *_factors(size), torch.ones(size[0]), torch.full((3, 4), torch.nan), fresh=True
    ).any()
    out = torch.randn(3, 4)
    assert torch.equal(fast("weighted_sum", *_factors(size), torch.ones(size[0]), out.clone()), out)


def _row_norms(ids, g, rows):
    full = torch.zeros(ids.shape[0], rows, g.shape[2], dtype=torch.float64)
    full.scatter_add_(1, ids.unsqueeze(2).expand(-1, -1, g.shape[2]), g.double())
    return full.square().sum((1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "rows"), [((2, 1, 3), 4), ((3, 63, 60), 5), ((1, 17, 33), 1), ((2, 9, 1100), 90)], ids=str
)
def test_rows(fast, shape, rows, dtype):
    ids, g = torch.randint(rows, shape[:2]), torch.randn(shape).to(dtype)
    for programs in (None, 4):
        norm = fast("row_square", ids, g, programs=programs)
        exact = _row_norms(ids, g, rows)
        _close(norm.value_N, exact)
        assert (norm.value_N.double() * (1 + 1e-6) + norm.error_N.double() >= exact).all()


def test_rows_that_stand_alone_have_no_error_and_those_that_cancel_do(fast):
    g = torch.randn(2, 4, 7)
    g[1, 1] = -g[1, 0]
    ids = torch.tensor([[3, 1, 0, 2], [5, 5, 0, 1]])
    error = fast("row_square", ids, g).error_N
    assert error[0] == 0
    assert error[1] > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 63, 60), (3, 5, 33), (1, 40, 1100)], ids=str)
@pytest.mark.parametrize("centred", [0, 1])
def test_norm_affine(fast, centred, shape, dtype):
    x, g = (3 * torch.randn(shape) + 1).to(dtype), torch.randn(shape).to(dtype)
    wide = x.double()
    wide = wide - wide.mean(2, keepdim=True) if centred else wide
    wide = wide / (wide.square().mean(2, keepdim=True) + 1e-5).sqrt()
    for programs in (None, 1):
        got = fast("norm_affine", x, g, 1e-5, centred, programs=programs)
        _close(got.weight_BF, (wide * g.double()).sum(1), 1e-5)
        _close(got.bias_BF, g.double().sum(1), 1e-5)


def test_rms_norm_without_eps_at_the_padding(fast):
    """Rows beyond the last have no spread to divide by."""
    x, g = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    got = fast("norm_affine", x, g, 0.0, 0)
    exact = (x.double() / x.double().square().mean(2, keepdim=True).sqrt() * g.double()).sum(1)
    _close(got.weight_BF, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(2, 150, 70, 33), (1, 20, 5, 130), (3, 65, 40, 64)], ids=str)
@pytest.mark.parametrize("summed", [1, 2])
def test_sums_over_positions_beside_the_norm(fast, summed, size, dtype):
    """In one launch with the Gram matrix, which has as many programs as without them, or few."""
    a, g = _factors(size, dtype)
    for programs in (None, 1):
        norm, sums = fast("symmetric_gram", a, g, 1, summed, programs=programs)
        _covers(norm, _gradients(a, g).square().sum((1, 2)), dtype)
        _close(sums, (a, g)[summed - 1].double().sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "fast"])
def test_a_private_step_by_kernels(fast, strategy, dtype):
    """Clipped sums of all kinds of layers with kernels on are those without, far within what the type resolves."""
    by_kernels, by_twins = (fast("clipped_sums", strategy, dtype, mode) for mode in ("on", "off"))
    for one, other in zip(by_kernels, by_twins, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=(2e-6 if dtype == torch.float32 else 8e-3) * scale)
