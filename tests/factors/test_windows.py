"""Convolutions without unfolded copies: each form of norm, gradient and sum against torch's own."""

from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghostclip.factors import Windows, convolution, joined
from ghostclip.factors.convolution import Geometry
from tests.exactness.runs import engine
from tests.factors.largest import LargestTensor

F64 = torch.float64
B = 3


def _geometry(shape, **given):
    dims = len(shape) - 2
    padding = given.get("padding", ((0, 0),) * dims)
    ones = (1,) * dims
    stride, dilation = given.get("stride", ones), given.get("dilation", ones)
    return Geometry(torch.Size(shape), stride, padding, dilation, given.get("groups", 1))


# Name -> (geometry, rows of a sample, space, positions fewer than there is room for along every axis).
TABLE = {
    "plain": (_geometry((5, 4, 3, 3)), 1, (6, 7), 0),
    "padded": (_geometry((5, 4, 3, 2), padding=((1, 1), (2, 2))), 1, (6, 7), 0),
    "uneven_padding": (_geometry((5, 4, 2, 4), padding=((0, 1), (1, 2))), 1, (6, 7), 0),
    "dilated": (_geometry((5, 4, 3, 2), padding=((2, 2), (0, 0)), dilation=(2, 3)), 1, (6, 7), 0),
    "stride": (_geometry((5, 4, 3, 3), padding=((1, 1), (0, 0)), stride=(2, 3)), 1, (6, 8), 0),
    "groups": (_geometry((6, 2, 3, 3), padding=((1, 1), (1, 1)), groups=3), 1, (5, 4), 0),
    "depthwise": (_geometry((4, 1, 3), padding=((1, 1),), groups=4), 1, (9,), 0),
    "frames": (_geometry((5, 4, 3), padding=((1, 1),)), 2, (9,), 0),
    "frames_in_groups": (_geometry((6, 2, 3), groups=2), 3, (7,), 0),
    "pointwise": (_geometry((5, 4, 1, 1)), 1, (6, 7), 0),
    "pointwise_stride": (_geometry((6, 2, 1, 1), stride=(2, 2), groups=2), 2, (5, 6), 0),
    "pointwise_padded": (_geometry((5, 4, 1), padding=((1, 1),)), 1, (6,), 0),
    "one_position": (_geometry((5, 4, 6, 7)), 1, (6, 7), 0),
    "volume": (_geometry((3, 2, 2, 2, 2), padding=((1, 1), (0, 0), (1, 1))), 1, (3, 4, 3), 0),
    "room_left": (_geometry((5, 4, 3, 3), padding=((1, 1), (1, 1))), 1, (9, 8), 3),
    "room_left_by_stride": (_geometry((5, 4, 3), padding=((1, 1),), stride=(2,)), 1, (12,), 2),
    "wide_kernel": (_geometry((5, 4, 7), padding=((3, 3),)), 1, (4,), 0),
}


def _factor(name, samples=B):
    geometry, rows, space, fewer = TABLE[name]
    x = torch.randn(samples, rows, geometry.shape[1] * geometry.groups, *space, dtype=F64)
    padded = functional.pad(x.flatten(0, 1), [n for pair in reversed(geometry.padding) for n in pair])
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(space) - 1]
    kernel = torch.zeros(geometry.shape, dtype=F64)
    y = convolve(padded, kernel, None, geometry.stride, 0, geometry.dilation, geometry.groups)
    positions = [size - fewer for size in y.shape[2:]]
    return Windows(x, torch.randn(samples, rows, geometry.shape[0], *positions, dtype=F64), geometry)


def _by_autograd(factor):
    """Each sample's gradient of the kernel, from torch's own convolution."""
    geometry, found = factor.geometry, []
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(geometry.kernel) - 1]
    for x_KC, g_KO in zip(factor.x_BKC, factor.g_BKO, strict=True):
        kernel = torch.zeros(geometry.shape, dtype=F64, requires_grad=True)
        padded = functional.pad(x_KC, [n for pair in reversed(geometry.padding) for n in pair])
        y = convolve(padded, kernel, None, geometry.stride, 0, geometry.dilation, geometry.groups)
        y = y[(..., *(slice(size) for size in g_KO.shape[2:]))]
        found.append(torch.autograd.grad(y, kernel, g_KO)[0])
    return torch.stack(found)


@pytest.fixture(params=TABLE)
def factor(request):
    return _factor(request.param)


def test_gradients_and_sum(factor):
    expected = _by_autograd(factor)
    torch.testing.assert_close(factor.materialize(), expected)
    torch.testing.assert_close(factor.unfolded().materialize(), expected)
    coef, out = torch.rand(B, dtype=F64), torch.randn(factor.shape, dtype=F64)
    total = out + torch.einsum("b,b...->...", coef, expected)
    factor.add_clipped_sum_(coef, out)
    torch.testing.assert_close(out, total)
    flat = torch.zeros(factor.numel(), dtype=F64)
    factor.reshaped(flat.shape).add_clipped_sum_(coef, flat)
    torch.testing.assert_close(flat, torch.einsum("b,b...->...", coef, expected).flatten())


@pytest.mark.parametrize("name", ["plain", "groups", "one_position", "pointwise"])
def test_a_sum_replaces_what_memory_held(name):
    factor, coef = _factor(name), torch.rand(B, dtype=F64)
    out = torch.full(factor.shape, torch.nan, dtype=F64)
    factor.write_clipped_sum_(coef, out)
    torch.testing.assert_close(out, torch.einsum("b,b...->...", coef, _by_autograd(factor)))


def test_every_form_of_norm(factor):
    expected = _by_autograd(factor).flatten(1).square().sum(1)
    forms = [factor.sqnorm, factor.gram_sqnorm, factor.instantiated_sqnorm]
    if set(factor.geometry.stride) == {1}:
        forms.append(factor.pixel_sqnorm)
    for form in forms:
        value, error, _ = form()
        torch.testing.assert_close(value, expected)
        assert error is None or ((error >= 0).all() and (error <= 1e-10 * expected).all())


def test_masked_samples_are_gone_even_if_they_are_not_finite(factor):
    expected = factor.materialize()
    expected[1] = 0
    factor.x_BKC[1] = float("nan")
    factor.g_BKO[1] = float("inf")
    for form in (factor.sqnorm, factor.instantiated_sqnorm):
        value = form().value_B
        assert value[[0, 2]].isfinite().all()
        assert not value[1].isfinite()
    masked = factor.masked(torch.tensor([True, False, True]))
    torch.testing.assert_close(masked.materialize(), expected)
    out = torch.zeros(factor.shape, dtype=F64)
    masked.add_clipped_sum_(torch.ones(B, dtype=F64), out)
    torch.testing.assert_close(out, expected.sum(0))


def test_uses_of_one_kernel(factor):
    """Three uses stand side by side as further rows."""
    geometry = factor.geometry
    others = [Windows(torch.randn_like(factor.x_BKC), torch.randn_like(factor.g_BKO), geometry) for _ in range(2)]
    (together,) = joined([factor, *others])
    assert isinstance(together, Windows)
    expected = sum(_by_autograd(part) for part in (factor, *others))
    torch.testing.assert_close(together.materialize(), expected)
    torch.testing.assert_close(together.sqnorm().value_B, expected.flatten(1).square().sum(1))


# Wide and long enough for the backward of a convolution with one group a sample.
GROUPED = {
    "wide": (_geometry((24, 9, 3, 3), padding=((1, 1), (1, 1))), 1, (13, 12), 0),
    "stride": (_geometry((8, 8, 4, 3), stride=(2, 1)), 1, (27, 14), 0),
    "uneven": (_geometry((10, 16, 2), padding=((0, 1),)), 1, (150,), 0),
    "depthwise": (_geometry((20, 1, 3, 3), padding=((1, 1), (1, 1)), groups=20), 1, (7, 6), 0),
    "groups": (_geometry((24, 8, 3), groups=3), 2, (90,), 0),
    "volume": (_geometry((8, 8, 2, 3, 2)), 1, (7, 6, 8), 0),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_backward(name, monkeypatch):
    """A sample's own gradient, whatever its neighbours hold."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN, which this form is for")
    monkeypatch.setitem(TABLE, name, GROUPED[name])
    exact = _factor(name)
    factor = Windows(exact.x_BKC.float(), exact.g_BKO.float(), exact.geometry)
    assert factor._formed()._suits_groups()
    torch.testing.assert_close(factor.materialize().double(), exact.materialize(), rtol=1e-5, atol=1e-4)
    factor.x_BKC[1, :, :1], factor.g_BKO[1, :, -1:] = float("inf"), float("nan")
    neighbours = factor.materialize()[[0, 2]].double()
    torch.testing.assert_close(neighbours, exact.materialize()[[0, 2]], rtol=1e-5, atol=1e-4)


def test_pixels_over_estimate_what_they_cannot_resolve():
    """Two rows cancel but for 1e-4: the error bound covers what the Gram lost."""
    geometry = _geometry((64, 32, 3, 3), padding=((1, 1), (1, 1)))
    x, g = torch.randn(1, 1, 32, 6, 6), torch.randn(1, 1, 64, 6, 6)
    x, g = x.repeat(1, 2, 1, 1, 1), torch.cat([g, -(1 - 1e-4) * g], 1)
    exact = Windows(x.double(), g.double(), geometry).instantiated_sqnorm().value_B
    value, error, _ = Windows(x, g, geometry).pixel_sqnorm()
    assert (value + error).item() >= exact.item()
    assert error.item() > 0


@pytest.mark.parametrize(
    ("channels", "outputs", "size", "options"),
    [
        (16, 16, 24, {"padding": 1}),
        (32, 32, 8, {"padding": 1}),
        (3, 8, 32, {"kernel_size": 5, "stride": 2}),
        (24, 24, 16, {"padding": 1, "groups": 24}),
    ],
    ids=["kept", "pixels", "stride", "depthwise"],
)
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_windows_are_never_unfolded_whole(channels, outputs, size, options, strategy, monkeypatch):
    monkeypatch.setattr(convolution, "CHUNK_ELEMENTS", 1 << 12)
    monkeypatch.setattr("ghostclip.kernels.runtime.ON_CPU", 1 << 12)
    samples, model = 8, nn.Conv2d(channels, outputs, **{"kernel_size": 3, **options})
    x = torch.randn(samples, channels, size, size)
    clipper = engine(strategy)(model, 1.0)
    clipper.backward(model(x).square().mean((1, 2, 3)))
    y = model(x)
    with LargestTensor() as seen:
        clipper.backward(y.square().mean((1, 2, 3)))
    unfolded = samples * channels * prod(model.kernel_size) * prod(y.shape[2:])
    # Padding and layouts of its own make the backend's copies of input and gradient a little larger than they are.
    allowed = max(1.6 * x.numel(), 2 * y.numel())
    assert seen.elements <= allowed < 0.6 * unfolded
