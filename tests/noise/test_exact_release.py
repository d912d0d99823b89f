"""From a clipper to an exact release, as a private optimizer does it; what cannot be rounded is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.clipping.policies import per_layer
from ghostclip.errors import InvalidOptionError
from ghostclip.noise import ExactNoise
from ghostclip.noise.exact import ExactRelease, Grid

C = 0.4


def setting(reduction="mean", **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    options = {"max_grad_norm": C, "strategy": "hooks", "loss_reduction": reduction} | options
    return model, GhostClipper(model, **options)


def backward(model, x, y, reduction):
    nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_physical_batches_make_up_the_clipped_sum(reduction):
    x, y = torch.randn(9, 5) * 4, torch.randint(3, (9,))
    model, clipper = setting(reduction)
    backward(model, x, y, reduction)
    parameters = clipper.trainable_parameters()
    want = [clipper.summed_gradient(p).clone() for p in parameters]
    clipper.reset()
    model, clipper = setting(reduction)
    parameters, exact = clipper.trainable_parameters(), ExactRelease(clipper, ExactNoise())
    for start in (0, 4, 8):
        backward(model, x[start : start + 4], y[start : start + 4], reduction)
        exact.collect()
        assert all(p.grad_sample is None for p in parameters)
    released = exact.release(parameters, std=0.0)
    for got, expected in zip(released, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert not any(part.any() for part in exact.release(parameters, std=0.0))


def test_an_empty_batch_has_no_samples_and_releases_nothing():
    model, clipper = setting()
    exact = ExactRelease(clipper, ExactNoise())
    backward(model, torch.randn(0, 5), torch.randint(3, (0,)), "mean")
    assert [p.grad_sample.shape for p in model.parameters()] == [(0, *p.shape) for p in model.parameters()]
    exact.collect()
    assert not any(part.any() for part in exact.release(clipper.trainable_parameters(), std=0.0))


def test_noise_follows_the_bound_and_the_relation():
    for relation, factor in (("zero_out", 1), ("replace_one", 2)):
        _model, clipper = setting(relation=relation)
        exact = ExactRelease(clipper, ExactNoise())
        clipper.max_grad_norm = 2 * C
        released = torch.cat(
            [
                exact.release([p], std=3.0 * clipper.sensitivity())[0].flatten()
                for p in clipper.trainable_parameters() * 60
            ]
        )
        assert abs(released.std().item() / (3 * 2 * C * factor) - 1) < 6 / math.sqrt(2 * len(released))


def test_a_sample_that_is_not_finite_is_left_out_and_an_abandoned_batch_forgotten():
    model, clipper = setting("sum")
    exact, parameters = ExactRelease(clipper, ExactNoise()), clipper.trainable_parameters()
    x, y = torch.randn(3, 5), torch.tensor([0, 1, 2])
    backward(model, x, y, "sum")
    exact.collect()
    backward(model, x, y, "sum")
    x[1, 2] = math.nan
    clipper.reset()
    backward(model, x, y, "sum")
    exact.collect()
    released = exact.release(parameters, std=0.0)
    for got, p in zip(released, parameters, strict=True):
        torch.testing.assert_close(got, clipper.summed_gradient(p), rtol=1e-5, atol=1e-6)
        assert got.isfinite().all()


def test_what_cannot_be_rounded_is_refused():
    for strategy in ("bookkeeping", "ghost", "fast", "auto"):
        with pytest.raises(InvalidOptionError, match=r"'exact' with strategy '.*grad_sample_mode='hooks'"):
            ExactRelease(setting(strategy=strategy)[1], ExactNoise())
    with pytest.raises(InvalidOptionError, match="several or adaptive bounds"):
        ExactRelease(setting(max_grad_norm=None, policy=per_layer(1.0))[1], ExactNoise())
    model, clipper = setting("sum")
    exact = ExactRelease(clipper, ExactNoise())
    exact.collect()
    for _ in range(2):
        backward(model, torch.randn(2, 5), torch.tensor([0, 1]), "sum")
    with pytest.raises(InvalidOptionError, match="2 backwards before one step"):
        exact.collect()


class Silent(ExactNoise):
    """Keeps the integers as they are and shows them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def add_(self, tensor, std):
        self.seen.append((tensor.clone(), std))


def integers(records, *, batch, sigma=2.0):
    """The integers that a release would add noise to, from physical batches of some size."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.LayerNorm(4))
    (x, y), source = records, Silent()
    with GhostClipper(model, max_grad_norm=C, strategy="hooks", loss_reduction="sum") as clipper:
        parameters, exact = clipper.trainable_parameters(), ExactRelease(clipper, source)
        for start in range(0, len(x), batch):
            loss = nn.functional.cross_entropy(
                model(x[start : start + batch]), y[start : start + batch], reduction="sum"
            )
            loss.backward()
            exact.collect()
        exact.release(parameters, std=sigma * C)
    assert all(0 <= std - sigma * 2**24 < 1e-6 for _, std in source.seen)
    return [total for total, _ in source.seen]


@pytest.fixture
def records():
    return torch.randn(7, 6) * 3, torch.randint(4, (7,))


def test_no_record_moves_the_integers_by_more_than_the_bound(records):
    """Every other record's integers stay the same to the last bit, so that the difference is one record's alone."""
    x, y = records
    whole = integers(records, batch=1)
    for left_out in range(7):
        keep = [i for i in range(7) if i != left_out]
        without = integers((x[keep], y[keep]), batch=1)
        alone = integers((x[[left_out]], y[[left_out]]), batch=1)
        moved = [a - b for a, b in zip(whole, without, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(moved, alone, strict=True))
        assert 0 < sum(int(v) ** 2 for part in moved for v in part.flatten().tolist()) <= 2**48


def test_refuses_what_would_be_lost():
    with pytest.raises(InvalidOptionError, match=r"\(2,\) clip factors"):
        Grid.for_norm(1.0).quantize([torch.zeros(3, 5)], torch.ones(2))
    model = nn.Linear(6, 4)
    with GhostClipper(model, max_grad_norm=C, strategy="hooks", loss_reduction="sum") as clipper:
        exact = ExactRelease(clipper, ExactNoise())
        model(torch.randn(3, 6)).sum().backward()
        exact.collect()
        with pytest.raises(InvalidOptionError, match="not released"):
            exact.release([model.weight], std=1.0)
