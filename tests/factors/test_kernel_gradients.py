"""Layouts of a convolution's windows: every one of them against torch's own gradient of each sample."""

import pytest
import torch

from ghostclip.factors import convolution
from ghostclip.factors.convolution import KernelGradients, unfolded, unfolded_channels_last, unfolded_in_phases
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
