"""The report: what is fine passes with figures, what is not is named with place and remedy, and nothing is changed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.errors import UnsupportedModelError
from tests.cases import by_name
from tests.validation.mixers import KEEPS_APART, MIXERS, inputs

STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")


def _classifier():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.4), nn.Linear(7, 3)).double()


def _batch(samples=4):
    return inputs((samples, 5)).double(), torch.arange(samples) % 3


def _cross_entropy(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _mean(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def _square(model, x):
    return model(x).flatten(1).square().mean(1)


def test_a_sound_model_passes_in_every_strategy():
    report = ghostclip.validate(_classifier(), _batch(), _cross_entropy, strategy=STRATEGIES)
    assert report.ok, str(report)
    assert [result.strategy for result in report.results] == list(STRATEGIES)
    for result in report.results:
        assert result.error < 1e-10
        assert result.norm_error < 1e-10
        # Something was clipped, so that the bound is met by some sample.
        assert 0.9 < result.sensitivity <= 1 + 1e-9
    assert report.coverage is not None
    assert len(report.coverage) == 4
    page = str(report)
    assert "can be trained privately" in page
    assert "one for each sample" in page
    report.raise_if_bad()


@pytest.mark.parametrize("name", ["gpt2_tied", "mixtral"])
def test_transformers_pass(name):
    case = by_name(f"hf_{name}")
    model, batch = case.model(torch.float32), case.data(torch.float32)
    report = ghostclip.validate(model, batch, case.losses)
    assert report.ok, str(report)
    assert report.results[0].error < 1e-4


def test_a_scalar_mean_passes_and_auto_is_resolved():
    report = ghostclip.validate(_classifier(), _batch(), _mean)
    assert report.ok, str(report)
    assert report.results[0].strategy == "bookkeeping"
    assert "declared as the mean" in str(report)


@pytest.mark.parametrize("name", MIXERS)
def test_mixing_is_found_and_placed(name):
    build, shape, path, said = MIXERS[name]
    report = ghostclip.validate(build(), inputs(shape), _square)
    assert not report.ok
    assert any(problem.place.split(" ")[0] == (path or "model") for problem in report.problems), str(report)
    assert all(problem.remedy for problem in report.problems)
    assert said in str(report)
    with pytest.raises(UnsupportedModelError, match=path or "model"):
        report.raise_if_bad()


@pytest.mark.parametrize("name", KEEPS_APART)
def test_what_keeps_samples_apart_passes(name):
    build, shape = KEEPS_APART[name]
    report = ghostclip.validate(build().double(), inputs(shape).double(), _square)
    assert report.ok, str(report)


def _standardised(model, batch):
    """Losses are divided by their standard deviation over the batch."""
    losses = _cross_entropy(model, batch)
    return (losses / losses.detach().var(correction=0).sqrt().clamp(min=1e-3)).mean()


def _hard_mining(model, batch):
    return _cross_entropy(model, batch).topk(min(2, len(batch[1]))).values.mean()


def _token_mean(model, batch):
    """A mean over all counted positions; samples have different numbers of them."""
    x, lengths = batch
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    return (model(x).square().mean(2) * mask).sum() / mask.sum()


@pytest.mark.parametrize("loss", [_standardised, _hard_mining])
def test_scalar_losses_that_compare_samples(loss):
    report = ghostclip.validate(_classifier(), _batch(5), loss)
    assert [problem.place for problem in report.problems] == ["loss_fn"], str(report)
    assert "reduction='none'" in report.problems[0].remedy


def test_mean_over_all_tokens():
    batch = inputs((3, 4, 5)).double(), torch.tensor([4, 1, 2])
    report = ghostclip.validate(nn.Linear(5, 3).double(), batch, _token_mean)
    assert [problem.place for problem in report.problems] == ["loss_fn"], str(report)


@pytest.mark.parametrize(("declared", "meant"), [("mean", "sum"), ("sum", "mean")])
def test_wrong_reduction(declared, meant):
    def loss(model, batch):
        losses = _cross_entropy(model, batch)
        # An operation after the reduction hides it from the engine.
        return (losses.sum() if meant == "sum" else losses.mean()) * 1.0

    report = ghostclip.validate(_classifier(), _batch(), loss, loss_reduction=declared)
    (problem,) = report.problems
    assert problem.place == "loss_fn"
    assert f"loss_reduction={meant!r}" in problem.remedy
    assert ghostclip.validate(_classifier(), _batch(), loss, loss_reduction=meant).ok


def test_per_sample_losses_that_look_at_others():
    def loss(model, batch):
        losses = _cross_entropy(model, batch)
        return losses - losses.mean()

    report = ghostclip.validate(_classifier(), _batch(), loss)
    assert not report.ok
    assert "other samples" in str(report)


def test_a_loss_that_fails_on_one_sample_alone():
    def loss(model, batch):
        if len(batch[1]) == 1:
            raise ValueError("needs negatives")
        return _cross_entropy(model, batch)

    report = ghostclip.validate(_classifier(), _batch(), loss)
    (problem,) = report.problems
    assert "one sample alone" in problem.place
    assert "needs negatives" in problem.found


class _Counts(nn.Module):
    """Has state of every kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.norm = nn.InstanceNorm1d(5, affine=True)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        self.calls += 1
        return self.head(self.drop(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)))


@pytest.mark.parametrize("sound", [True, False])
def test_everything_is_left_as_it_was(sound):
    model = nn.Sequential(_Counts(), nn.Identity() if sound else nn.BatchNorm1d(4))
    model[0].drop.eval()
    model[0].head.weight.grad = torch.ones_like(model[0].head.weight)
    before = copy.deepcopy(model)
    grad, state = model[0].head.weight.grad, torch.get_rng_state()
    ids = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(1))
    report = ghostclip.validate(model, ids, lambda m, x: m(x).square().mean((1, 2)))
    assert report.ok == sound, str(report)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, value), (_, old) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(value, old), name
    assert model[0].head.weight.grad is grad
    assert bool((grad == 1).all())
    assert model[0].head.bias.grad is None
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert model[0].drop.p == 0.3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_wrong_engine_is_found(monkeypatch):
    """A clipped sum that is off by a factor shows in the report."""
    from ghostclip.clipping.store import GradientStore

    finish = GradientStore.finish

    def doubled(self):
        finish(self)
        for total in (*self._sums.values(), *(p.grad for p in self._shown if p.grad is not None)):
            total.mul_(2)

    monkeypatch.setattr(GradientStore, "finish", doubled)
    report = ghostclip.validate(_classifier(), _batch(), _cross_entropy, strategy="bookkeeping")
    assert {problem.place for problem in report.problems} == {"strategy 'bookkeeping'"}
    assert any("C" in problem.found and "moves" in problem.found for problem in report.problems)


class _Sampled(nn.Module):
    """Outputs with noise of their own, as a variational model draws."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3).double()

    def forward(self, x):
        return self.layer(x) + torch.randn(len(x), 3, dtype=x.dtype)


@pytest.mark.parametrize(("loss", "said", "compared"), [
    (_cross_entropy, "compared within one forward", 1), (_mean, "could not be checked", 0)
])  # fmt: skip
def test_losses_that_draw_numbers_are_compared_as_far_as_they_can_be(loss, said, compared):
    report = ghostclip.validate(_Sampled(), _batch(), loss)
    assert report.ok, str(report)
    assert said in str(report)
    assert len(report.results) == compared
    assert all(result.error < 1e-10 and result.sensitivity is None for result in report.results)


def test_gradients_that_are_all_zero_are_compared_too():
    report = ghostclip.validate(_classifier(), _batch(), lambda model, batch: 0 * _cross_entropy(model, batch))
    assert report.ok, str(report)
    assert report.results[0].error == 0
