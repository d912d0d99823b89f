"""Backward functions and hooks of one's own: exact, or refused where a mean or the batch itself changes them."""

from itertools import permutations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError
from tests.exactness.runs import engine
from tests.reference import clip_and_sum, per_sample_gradients, trainable

_C = 1.0
_F64 = torch.float64
# Of strategies that take a plain backward of a mean.
_PLAIN = ["bookkeeping", "hooks"]


def _function(change):
    """Return the identity with a backward of its own."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return change(grad, *ctx.saved_tensors)

    return Own.apply


def _hooked(change):
    def set_hook(hidden):
        values = hidden.detach()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: change(grad, values))
        return hidden

    return set_hook


class _Net(nn.Module):
    def __init__(self, between, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self._between, self._reentrant = between, reentrant
        self.double()

    def _hidden(self, x):
        return self._between(torch.tanh(self.first(x)))

    def forward(self, x):
        if self._reentrant is None:
            return self.last(self._hidden(x))
        return self.last(checkpoint(self._hidden, x.clone().requires_grad_(), use_reentrant=self._reentrant))


def _losses(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def _batch(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, 4, dtype=_F64, generator=generator),
        "y": torch.randint(3, (size,), generator=generator),
    }


def _sums(model):
    return {name: p.grad for name, p in trainable(model).items()}


_WITHOUT_SCALE = {
    "clamped": lambda grad, _: grad.clamp(-0.01, 0.01),
    "clamped far away": lambda grad, _: grad.clamp(-1e3, 1e3),
    "sign": lambda grad, _: grad.sign(),
    "each row by its norm": lambda grad, _: grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-12),
    "small ones dropped": lambda grad, _: grad * (grad.abs() > 1e-3),
}
_OF_THE_BATCH = {
    "its norm": lambda grad, _: grad / grad.norm(),
    "its largest": lambda grad, _: grad / grad.abs().max(),
    "another's": lambda grad, _: grad * (1 + grad[0].abs().sum()),
    "its size": lambda grad, _: grad * len(grad),
    "one over its size": lambda grad, values: grad / len(values),
    "a deviation": lambda grad, values: grad / values.std(),
}
_LINEAR = {
    "reversed": lambda grad, _: -0.7 * grad,
    "straight through": lambda grad, values: grad * (values.abs() < 0.5),
    "by its own row": lambda grad, values: grad / values.norm(dim=1, keepdim=True),
    "without NaN": lambda grad, _: grad.nan_to_num(),
}


_MADE = [(_function, None), (_hooked, None), (_function, True), (_hooked, False)]


@pytest.mark.parametrize(
    ("way", "made", "reentrant"),
    [*(("clamped", *made) for made in _MADE), *((way, _function, None) for way in list(_WITHOUT_SCALE)[1:])],
)
def test_a_mean_hands_out_gradients_that_follow_the_number_of_samples(way, made, reentrant):
    model, batch = _Net(made(_WITHOUT_SCALE[way]), reentrant), _batch(5)
    ghostclip.GhostClipper(model, max_grad_norm=_C)
    with pytest.raises(LossReductionError, match="not scaled as the loss"):
        _losses(model, batch).mean().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("strategy", _PLAIN)
@pytest.mark.parametrize("way", _WITHOUT_SCALE)
def test_of_a_sum_each_gradient_is_that_of_the_samples_own_loss(way, strategy):
    between, batch = _hooked(_WITHOUT_SCALE[way]), _batch(5)
    expected = clip_and_sum(per_sample_gradients(_Net(between), batch, _losses, axes={}), _C).clipped
    model = _Net(between)
    engine(strategy, loss_reduction="sum")(model, _C)
    _losses(model, batch).sum().backward()
    torch.testing.assert_close(_sums(model), expected)


def test_losses_of_the_samples_are_exact(strategy):
    between, batch = _function(_WITHOUT_SCALE["clamped"]), _batch(5)
    expected = clip_and_sum(per_sample_gradients(_Net(between), batch, _losses, axes={}), _C).clipped
    model = _Net(between)
    engine(strategy)(model, _C).backward(_losses(model, batch))
    torch.testing.assert_close(_sums(model), expected)


@pytest.mark.parametrize(
    ("way", "made", "reentrant"),
    [*(("reversed", *made) for made in _MADE), *((way, _function, None) for way in list(_LINEAR)[1:])],
)
def test_what_is_linear_and_each_samples_own_is_exact(way, made, reentrant):
    between = made(_LINEAR[way])
    model = _Net(between, reentrant)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=_C)
    for size in (5, 3):
        expected = clip_and_sum(per_sample_gradients(_Net(between), _batch(size), _losses, axes={}), _C).clipped
        clipper.reset()
        _losses(model, _batch(size)).mean().backward()
        torch.testing.assert_close(_sums(model), expected)


@pytest.mark.parametrize("made", [_function, _hooked])
@pytest.mark.parametrize("way", _OF_THE_BATCH)
def test_a_backward_that_follows_the_batch_is_refused(way, made):
    for size, dtype in ((5, _F64), (2, _F64), (3, torch.float32)):
        model, batch = _Net(made(_OF_THE_BATCH[way])).to(dtype), _batch(size)
        ghostclip.GhostClipper(model, max_grad_norm=_C)
        with pytest.raises(SampleMixingError, match=r"follows the batch|gradients came with it"):
            _losses(model, batch | {"x": batch["x"].to(dtype)})


def test_a_backward_that_follows_the_batch_is_refused_in_every_strategy(strategy):
    model = _Net(_function(_OF_THE_BATCH["a deviation"]))
    clipper = engine(strategy)(model, _C)
    with pytest.raises(SampleMixingError, match="follows the batch"):
        clipper.backward(_losses(model, _batch(5)))


def _dropped(between):
    """Return a function with dropout before and behind it, whose masks a checkpoint draws a second time."""
    return lambda hidden: nn.functional.dropout(between(nn.functional.dropout(hidden, 0.3)), 0.3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpoint_is_exact(reentrant, strategy):
    between, batch = _dropped(_function(_LINEAR["reversed"])), _batch(5)
    reference = _Net(between)
    torch.manual_seed(3)
    samples = per_sample_gradients(reference, batch, _losses, axes={}, mode="batched_graph")
    model = _Net(between, reentrant)
    clipper = engine(strategy)(model, _C)
    for _ in range(2):
        clipper.reset()
        torch.manual_seed(3)
        clipper.backward(_losses(model, batch))
        torch.testing.assert_close(_sums(model), clip_and_sum(samples, _C).clipped)


@pytest.mark.parametrize("way", ["its size", "one over its size", "a deviation"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpoint_hides_no_backward_that_follows_the_batch(way, reentrant):
    model = _Net(_dropped(_function(_OF_THE_BATCH[way])), reentrant)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=_C)
    with pytest.raises(SampleMixingError, match="follows the batch"):
        clipper.backward(_losses(model, _batch(5)))


_IN_THE_LOSS = {
    "by the norm of the batch": lambda grad, _: grad / grad.norm(),
    "centred": lambda grad, _: grad - grad.mean(0),
}


@pytest.mark.parametrize("way", _IN_THE_LOSS)
def test_a_backward_of_the_loss_that_mixes_samples(way, strategy):
    for size in (2, 3, 5):
        own, batch = _function(_IN_THE_LOSS[way]), _batch(size)
        model = _Net(lambda hidden: hidden)
        clipper = engine(strategy)(model, _C)
        with pytest.raises(SampleMixingError):
            clipper.backward(nn.functional.cross_entropy(own(model(batch["x"])), batch["y"], reduction="none"))


def _scaled_unseen(factor):
    """Return the identity whose gradient alone is scaled, by torch's own operations."""

    def between(hidden):
        scaled = hidden * factor(hidden.detach())
        return scaled + (hidden - scaled).detach()

    return between


def _scaled_without_grad(factor):
    def between(hidden):
        with torch.no_grad():
            rest = hidden * (1 - factor(hidden))
        return hidden * factor(hidden.data) + rest

    return between


@pytest.mark.parametrize("made", [_scaled_unseen, _scaled_without_grad])
@pytest.mark.parametrize("factor", [lambda h: h.std(), lambda h: h.norm() / len(h), lambda h: h.abs().amax(0)])
def test_a_factor_of_the_batch_that_the_outputs_do_not_show_is_refused(made, factor):
    model = _Net(made(factor))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=_C)
    with pytest.raises(SampleMixingError, match="follows the batch"):
        clipper.backward(_losses(model, _batch(5)))


@pytest.mark.parametrize("made", [_scaled_unseen, _scaled_without_grad])
@pytest.mark.parametrize("factor", [lambda h: 0.5, lambda h: h.norm(dim=1, keepdim=True)])
def test_a_factor_of_each_sample_that_the_outputs_do_not_show_is_exact(made, factor):
    expected = clip_and_sum(per_sample_gradients(_Net(made(factor)), _batch(5), _losses, axes={}), _C).clipped
    model = _Net(made(factor))
    ghostclip.GhostClipper(model, max_grad_norm=_C).backward(_losses(model, _batch(5)))
    torch.testing.assert_close(_sums(model), expected)


def test_noise_that_each_sample_meets_by_its_place_is_no_backward_that_follows_the_batch():
    reverse = _function(_LINEAR["reversed"])
    model = _Net(lambda hidden: reverse(hidden + torch.randn_like(hidden)))
    with ghostclip.GhostClipper(model, max_grad_norm=_C) as clipper:
        clipper.backward(_losses(model, _batch(5)))
        assert "batch independence (of gradients): random numbers are drawn" in str(clipper.coverage())


class _OneFollowsAnother(nn.Module):
    def __init__(self, follower, leader):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.follower, self.leader = follower, leader

    def forward(self, x):
        h = self.first(x)
        added = torch.zeros(len(x), len(x))
        added[self.follower, self.leader] = 1e-3
        return self.last(h + added @ h)


@pytest.mark.parametrize("pair", list(permutations(range(4), 2)), ids=str)
def test_one_sample_that_follows_another_by_a_thousandth(pair):
    model = _OneFollowsAnother(*pair)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(SampleMixingError, match="other samples"):
        model(torch.randn(4, 3))


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 2.0**-100), (torch.float32, 2.0**60), (torch.bfloat16, 1.0), (_F64, 2.0**60)]
)
def test_gradients_of_any_size_are_told_apart_and_none_is_refused(dtype, scale):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward((model(torch.randn(32, 3, dtype=dtype)) * scale).square().sum(1))
        assert clipper.batch_size == 32


def _packed(pack):
    """Return tanh whose saved values go through a hook."""

    def between(hidden):
        with saved_tensors_hooks(pack, lambda values: values):
            return torch.tanh(hidden)

    return between


def test_saved_values_that_a_hook_changes_with_the_batch_are_refused():
    # As quantised activations are, with one scale for all samples.
    model = _Net(_packed(lambda values: values / values.abs().max()))
    with (
        ghostclip.GhostClipper(model, max_grad_norm=_C, strategy="bookkeeping") as clipper,
        pytest.raises(SampleMixingError, match="although these outputs did not change: a backward function, a hook"),
    ):
        clipper.backward(_losses(model, _batch(8)))


def test_such_a_hook_around_the_loop_is_refused_and_one_that_rounds_each_value_is_exact():
    def step(pack):
        model = _Net(torch.tanh)
        with ghostclip.GhostClipper(model, max_grad_norm=_C, strategy="bookkeeping") as clipper:
            with saved_tensors_hooks(pack, lambda values: values):
                loss = _losses(model, _batch(8)).mean()
            loss.backward()
        return _sums(model), clipper.per_sample_norms

    with pytest.raises(SampleMixingError, match="although these outputs did not change: a backward function, a hook"):
        step(lambda values: values / values.abs().max() if values.is_floating_point() else values)
    sums, norms = step(lambda values: values.float().to(values.dtype))
    exact, exact_norms = step(lambda values: values)
    torch.testing.assert_close(norms, exact_norms, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-7)
