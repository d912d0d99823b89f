"""Where clipped sums are kept: shared and 16-bit parameters, an optimizer that owns the sums, foreign changes."""

import weakref

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import TamperedGradientError


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, ids):
        return nn.functional.linear(self.mix(self.mix(self.table(ids))), self.table.weight)


def _losses(model, ids):
    return nn.functional.cross_entropy(model(ids).float().mT, ids, reduction="none").mean(1)


def _sum_of(clipper):
    return {name: clipper.summed_gradient(p).clone() for name, p in clipper.model.named_parameters()}


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_use_of_a_shared_parameter_counts(strategy, dtype, owned):
    """Two uses a layer and two backwards: what one strategy sums, all sum."""
    model, ids = _Tied().to(dtype), torch.randint(9, (4, 5))
    sums = {}
    for name in ("hooks", strategy):
        with ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy=name) as clipper:
            if owned:
                clipper.withhold_gradients()
            for _ in range(2):
                clipper.backward(_losses(model, ids))
            sums[name] = _sum_of(clipper)
            clipper.reset()
    for name, expected in sums["hooks"].items():
        assert expected.dtype == torch.float32
        torch.testing.assert_close(
            sums[strategy][name], expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )
        assert expected.abs().sum() > 0


def test_sums_of_16_bits_are_gone_by_the_next_forward_after_zero_grad(strategy):
    """What is added to is held beside ``p.grad``, as long as that is there."""
    model, ids = _Tied().bfloat16(), torch.randint(9, (4, 5))
    with ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy=strategy) as clipper:
        clipper.backward(_losses(model, ids))
        once, held = _sum_of(clipper), [weakref.ref(clipper.summed_gradient(p)) for p in model.parameters()]
        losses = _losses(model, ids)
        assert all(one() is not None for one in held)
        clipper.backward(losses)
        for name, twice in _sum_of(clipper).items():
            torch.testing.assert_close(twice, 2 * once[name], rtol=1e-2, atol=1e-4)
        model.zero_grad(set_to_none=True)
        losses = _losses(model, ids)
        assert all(one() is None for one in held)
        clipper.backward(losses)
        for name, again in _sum_of(clipper).items():
            torch.testing.assert_close(again, once[name], rtol=1e-2, atol=1e-4)


def test_a_sum_that_an_optimizer_owns_is_out_of_reach(strategy):
    """Clipping the sum again by its norm would make what is released depend on all samples without bound."""
    model, ids = _Tied(), torch.randint(9, (4, 5))
    with ghostclip.GhostClipper(model, max_grad_norm=10.0, strategy=strategy) as clipper:
        clipper.withhold_gradients()
        clipper.backward(_losses(model, ids))
        kept = _sum_of(clipper)
        assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0
        assert all(p.grad is None for p in model.parameters())
        for name, value in _sum_of(clipper).items():
            assert torch.equal(value, kept[name])


def test_a_sum_that_nobody_owns_is_noticed_when_it_was_changed(strategy):
    model, ids = _Tied(), torch.randint(9, (4, 5))
    model = model.to(torch.bfloat16)
    with ghostclip.GhostClipper(model, max_grad_norm=10.0, strategy=strategy) as clipper:
        clipper.backward(_losses(model, ids))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(TamperedGradientError, match=r"mix\.bias"):
            clipper.summed_gradient(model.mix.bias)


def test_a_second_backward_through_the_same_forward_is_refused(strategy):
    """It would clip the same samples twice, each time up to the bound."""
    model, ids = _Tied(), torch.randint(9, (4, 5))
    with ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper:
        first = _losses(model, ids)
        second = first * 2
        clipper.backward(first) if strategy in ("ghost", "fast") else first.mean().backward(retain_graph=True)
        with pytest.raises((ghostclip.errors.GhostClipError, RuntimeError)):
            clipper.backward(second)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "hooks"])
def test_a_backward_is_undone_to_the_bit(strategy):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.7, strategy=strategy)
    clipper.withhold_gradients(discard=lambda: None, samples=False)
    x = torch.randint(9, (6, 3))

    def backward(rows):
        clipper.backward(nn.functional.cross_entropy(model(x[rows]), x[rows, 0] % 2, reduction="none"))

    def same():
        return [torch.equal(one, clipper.summed_gradient(p)) for one, p in zip(sums, model.parameters(), strict=True)]

    backward(slice(0, 3))
    sums = [clipper.summed_gradient(p) for p in model.parameters()]
    with clipper.savepoint() as savepoint:
        backward(slice(3, 6))
        assert not any(same())
        savepoint.restore()
        assert all(same())
        backward(slice(3, 6))
    assert not any(same())
