"""Layouts of a convolution's windows: every one of them against torch's own gradient of each sample."""

import gc
import weakref

import pytest
import torch

from ghostclip.factors import Dense, Permuted, Windows, convolution, joined
from ghostclip.factors.convolution import KernelGradients, unfolded, unfolded_channels_last, unfolded_in_phases
from tests.factors.largest import LargestTensor
from tests.factors.test_windows import TABLE, B, _by_autograd, _factor, _geometry

F64 = torch.float64

# Strides that divide the kernel along the last axis, without dilation there.
PHASES = {
    "even": (_geometry((5, 3, 4, 4), stride=(2, 2), padding=((1, 1), (1, 1))), 1, (9, 8), 0),
    "odd_input": (_geometry((5, 3, 3, 6), stride=(2, 3), padding=((0, 0), (2, 2))), 1, (7, 14), 0),
    "uneven_padding": (_geometry((4, 2, 2, 4), stride=(3, 2), padding=((0, 1), (1, 2))), 1, (8, 9), 0),
    "one_tap": (_geometry((4, 3, 2, 2), stride=(2, 2)), 1, (6, 7), 0),
    "patches_of_a_line": (_geometry((4, 3, 5), stride=(5,)), 1, (17,), 0),
    "line": (_geometry((4, 1, 10), stride=(5,)), 1, (41,), 0),
    "dilated_elsewhere": (
        _geometry((4, 2, 3, 4), stride=(1, 2), dilation=(2, 1), padding=((2, 2), (1, 0))),
        1,
        (7, 9),
        0,
    ),
    "groups": (_geometry((6, 2, 2, 4), stride=(1, 2), groups=3), 1, (4, 9), 0),
    "frames_in_groups": (_geometry((6, 2, 4), stride=(2,), groups=2, padding=((1, 1),)), 3, (9,), 0),
    "volume": (_geometry((3, 2, 2, 3, 4), stride=(2, 1, 2), padding=((1, 1), (0, 0), (1, 1))), 1, (4, 4, 7), 0),
    "room_left": (_geometry((5, 3, 4), stride=(2,), padding=((1, 1),)), 1, (13,), 2),
    "padding_unseen": (_geometry((5, 3, 4), stride=(4,), padding=((0, 3),)), 1, (8,), 0),
}
LAYOUTS = [
    *((unfolded, name) for name in (*TABLE, *PHASES)),
    *((unfolded_channels_last, name) for name in (*TABLE, *PHASES)),
    *((unfolded_in_phases, name) for name in PHASES),
]


@pytest.fixture(params=LAYOUTS, ids=lambda given: f"{given[0].__name__}-{given[1]}")
def factor(request, monkeypatch):
    layout, name = request.param
    if name in PHASES:
        monkeypatch.setitem(TABLE, name, PHASES[name])
    monkeypatch.setattr(convolution, "_cheapest", lambda *given: layout)
    return _factor(name)


@pytest.mark.parametrize("elements", [1, 1 << 18], ids=["one_by_one", "at_once"])
def test_every_layout(factor, elements, monkeypatch):
    monkeypatch.setattr(convolution, "CHUNK_ELEMENTS", elements)
    expected = _by_autograd(factor)
    torch.testing.assert_close(factor.materialize(), expected)
    # Samples may lie apart, the numbers of one do not.
    assert factor.materialize()[0].is_contiguous()
    torch.testing.assert_close(factor.instantiated().materialize(), expected)
    torch.testing.assert_close(factor.instantiated_sqnorm().value_B, expected.flatten(1).square().sum(1))
    formed = KernelGradients(factor.x_BKC, factor.g_BKO, factor.geometry)
    for piece, grads in formed.pieces():
        torch.testing.assert_close(formed.in_order(grads), expected[piece])
    coef, out = torch.rand(B, dtype=F64), torch.randn(factor.shape, dtype=F64)
    total = out + torch.einsum("b,b...->...", coef, expected)
    factor.instantiated().add_clipped_sum_(coef, out)
    torch.testing.assert_close(out, total)
    flat = factor.reshaped((factor.numel(),)).instantiated()
    torch.testing.assert_close(flat.materialize(), expected.flatten(1))


def _windows(shape, size, **given):
    geometry = _geometry(shape, **given)
    x = torch.randn(B, 1, shape[1] * geometry.groups, *size)
    padded = [length + sum(pads) for length, pads in zip(size, geometry.padding, strict=True)]
    steps = zip(padded, geometry.kernel, geometry.dilation, geometry.stride, strict=True)
    positions = [(length - reach * (kernel - 1) - 1) // stride + 1 for length, kernel, reach, stride in steps]
    return Windows(x, torch.randn(B, 1, shape[0], *positions), geometry)


@pytest.mark.parametrize(
    ("factor", "layout"),
    [
        (lambda: _windows((16, 1, 8, 8), (28, 28), stride=(2, 2), padding=((3, 3), (3, 3))), unfolded_in_phases),
        (lambda: _windows((16, 3, 4, 4), (32, 32), stride=(2, 2), padding=((1, 1), (1, 1))), unfolded_in_phases),
        (lambda: _windows((32, 1, 10), (4000,), stride=(5,)), unfolded_in_phases),
        (lambda: _windows((32, 16, 4, 4), (13, 13), stride=(2, 2)), unfolded_channels_last),
        (lambda: _windows((32, 32, 3, 3), (8, 8), padding=((1, 1), (1, 1))), unfolded_channels_last),
        (lambda: _windows((64, 3, 7, 7), (32, 32), stride=(2, 2), padding=((3, 3), (3, 3))), unfolded_channels_last),
        (lambda: _windows((16, 3, 3, 3), (32, 32), padding=((1, 1), (1, 1))), unfolded),
        (lambda: _windows((32, 16, 4, 4), (32, 32), stride=(4, 4)), unfolded),
        (lambda: _windows((8, 1, 3, 3), (28, 28), padding=((1, 1), (1, 1))), unfolded),
        (lambda: _windows((32, 16, 3, 4), (13, 13), dilation=(1, 2), stride=(2, 2)), unfolded_channels_last),
        (lambda: _windows((16, 8, 3, 3), (18, 18), dilation=(1, 2)), unfolded),
        (lambda: _windows((16, 1, 4), (4000,), dilation=(2,), stride=(2,)), unfolded),
    ],
)
def test_layout_follows_what_lies_side_by_side(factor, layout):
    """The fastest of the three, measured, for each of these sizes."""
    found = factor()
    assert convolution._cheapest(found.x_BKC, found.g_BKO, found.geometry) is layout


def test_kept_gradients_are_not_put_in_order_sample_by_sample():
    """Beside the gradients themselves, and the parameter once, nothing of their size is made."""
    factor = _windows((32, 16, 4, 4), (13, 13), stride=(2, 2))
    samples = 24
    factor = Windows(torch.randn(samples, 1, 16, 13, 13), torch.randn(samples, 1, 32, 5, 5), factor.geometry)
    out, coef = torch.zeros(factor.shape), torch.rand(samples)
    with LargestTensor() as seen:
        kept = factor.instantiated()
    assert seen.elements == samples * factor.numel()
    assert isinstance(kept, Permuted)
    assert isinstance(kept.inner, Dense)
    with LargestTensor() as seen:
        kept.sqnorm()
        kept.add_clipped_sum_(coef, out)
    assert seen.elements <= factor.numel()
    torch.testing.assert_close(out, torch.einsum("b,b...->...", coef, factor.materialize()), rtol=1e-4, atol=1e-3)


def test_kept_gradients_of_one_kernel_add_up():
    uses = [_windows((32, 16, 4, 4), (13, 13), stride=(2, 2)) for _ in range(3)]
    (together,) = joined([use.instantiated() for use in uses])
    torch.testing.assert_close(together.materialize(), sum(use.materialize() for use in uses))


@pytest.mark.parametrize("name", ["plain", "pointwise"])
def test_inputs_go_with_their_factor(name):
    """Not when cycles are collected: a step would hold every layer's until then."""
    factor = _factor(name)
    held = weakref.ref(factor.x_BKC)
    gc.disable()
    try:
        factor.materialize()
        factor.instantiated_sqnorm()
        del factor
        assert held() is None
    finally:
        gc.enable()
