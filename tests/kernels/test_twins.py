"""Twins against one-sample definitions, the switch, and kernels that are found wrong before they are used."""

from __future__ import annotations

import logging

import pytest
import torch

from ghostclip import kernels
from ghostclip.kernels import runtime

F64 = torch.float64
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory):
    del poisoned_memory


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """As on a GPU, but for the device."""
    monkeypatch.setattr(runtime, "runs_on", lambda device: True)


@pytest.mark.parametrize("positions", [1, 2, 3, 7, 63, 64, 131, 160])
def test_norms(positions):
    a, g = torch.randn(3, positions, 6, dtype=F64), torch.randn(3, positions, 5, dtype=F64)
    expected = torch.stack([(g[n].T @ a[n]).square().sum() for n in range(3)])
    torch.testing.assert_close(kernels.symmetric_gram(a, g).value_N, expected)
    for whole, parts in zip(kernels.symmetric_gram(a, g), kernels.symmetric_gram(a, g, workspace=7), strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(kernels.outer_square(a, g).value_N, expected)
    torch.testing.assert_close(kernels.outer_square(a, g, samples_at_once=2).value_N, expected)


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0)])
def test_nothing_has_norm_zero(sizes):
    a, g = torch.zeros(*sizes, 6), torch.zeros(*sizes, 5)
    for norm in (kernels.symmetric_gram(a, g), kernels.outer_square(a, g)):
        assert norm.value_N.tolist() == norm.error_N.tolist() == [0.0] * sizes[0]


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 5), (5, 6)])
def test_weighted_sum(inputs, outputs):
    a, g = torch.randn(3, 4, inputs, dtype=F64), torch.randn(3, 4, outputs, dtype=F64)
    coef, out = torch.rand(3, dtype=F64), torch.randn(outputs, inputs, dtype=F64)
    expected = out + sum(coef[n] * g[n].T @ a[n] for n in range(3))
    expected_new = expected - out
    assert kernels.weighted_sum(a, g, coef, out) is out
    torch.testing.assert_close(out, expected)
    new = torch.full_like(out, torch.nan)
    assert kernels.weighted_sum(a, g, coef, new, fresh=True) is new
    torch.testing.assert_close(new, expected_new)


def test_rows():
    ids, g = torch.randint(4, (3, 9)), torch.randn(3, 9, 5, dtype=F64)
    full = torch.zeros(3, 4, 5, dtype=F64)
    for n in range(3):
        full[n].index_add_(0, ids[n], g[n])
    norm = kernels.row_square(ids, g)
    torch.testing.assert_close(norm.value_N, full.square().sum((1, 2)))
    assert (norm.error_N > 0).all()
    assert not kernels.row_square(torch.arange(9).repeat(3, 1), g).error_N.any()


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norm_affine(kind):
    layer = kind(6, eps=1e-3, dtype=F64)
    function = kernels.layer_norm_affine if kind is torch.nn.LayerNorm else kernels.rms_norm_affine
    x, g = torch.randn(3, 4, 6, dtype=F64), torch.randn(3, 4, 6, dtype=F64)
    got = function(x, g, eps=1e-3)
    for n in range(3):
        gradients = torch.autograd.grad(layer(x[n]), list(layer.parameters()), g[n])
        torch.testing.assert_close(got.weight_BF[n], gradients[0])
        torch.testing.assert_close(got.bias_BF[n], g[n].sum(0))


# Tiles enough for a GPU, and sums of thousands of products: an interpreter takes seconds.
LONG = {"symmetric_gram": (2,), "outer_square": (0, 1, 3), "weighted_sum": (0, 1, 3)}
EXAMPLES = [
    pytest.param(
        pair, make, marks=[pytest.mark.slow] if number in LONG.get(pair.name, ()) else [], id=f"{pair.name}-{number}"
    )
    for pair in kernels.TWINS
    for number, make in enumerate(pair.examples)
]


@pytest.mark.parametrize(("pair", "make"), EXAMPLES)
def test_kernel_agrees_on_its_own_examples(fast, pair, make):
    """What is compared before a kernel is first used on a device."""
    assert runtime.difference(fast(pair.name, *make(CPU)), pair.naive(*make(CPU))) < runtime.AGREEMENT / 10


def test_a_processor_uses_the_twin():
    with kernels.using("on"):
        assert all(pair.pick(torch.ones(2)) == pair.naive for pair in kernels.TWINS)


def _pair(fast_value, calls=None):
    def fast(x):
        if calls is not None:
            calls.append(1)
        return fast_value(x)

    return runtime.Twins("doubled", lambda x: 2 * x, fast, (lambda device: (torch.ones(3, device=device),),))


@pytest.mark.parametrize(
    ("mode", "pays", "used"), [("off", True, 0), ("auto", True, 1), ("auto", False, 0), ("on", False, 1)]
)
@pytest.mark.usefixtures("kernels_everywhere")
def test_the_switch(mode, pays, used):
    pair = _pair(lambda x: x + x)
    with kernels.using(mode):
        assert pair.pick(torch.ones(2), pays=pays) == (pair.fast if used else pair.naive)
        assert pair.pick(torch.ones(2, dtype=F64), pays=pays) == pair.naive


def _raises(x):
    raise RuntimeError("no room on this device")


@pytest.mark.parametrize(
    "wrong",
    [lambda x: 2.001 * x, lambda x: x * float("nan"), lambda x: 2 * x[:1], _raises],
    ids=["off", "nan", "shape", "error"],
)
@pytest.mark.usefixtures("kernels_everywhere")
def test_a_wrong_kernel_is_not_used(wrong, caplog):
    calls: list[int] = []
    pair = _pair(wrong, calls)
    with kernels.using("auto"), caplog.at_level(logging.WARNING):
        assert [pair.pick(torch.ones(2)) for _ in range(3)] == [pair.naive] * 3
    assert len(calls) == len(caplog.records) == 1
    assert "doubled" in caplog.text
