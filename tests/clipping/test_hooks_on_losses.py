"""Hooks between a model's outputs and its loss: those that change gradients are proved or refused, others may look."""

import pytest
import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError
from tests.exactness.runs import engine
from tests.reference import clip_and_sum, per_sample_gradients, trainable

B, C = 6, 0.1


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _mixes(grad):
    return grad - 2 * grad.mean(0)


def _in_place(grad):
    grad.sub_(2 * grad.mean(0))


def _losses(output, hook, place):
    """Losses of the samples, with a hook on the outputs, between these and the losses, or on the losses."""
    between = output.sin()
    losses_B = between.square().sum(1)
    {"outputs": output, "between": between, "losses": losses_B}[place].register_hook(hook)
    return losses_B


def _batch():
    return torch.randn(B, 4, dtype=torch.float64) * 2


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("hook", [_mixes, _in_place])
def test_hook_that_mixes_samples_below_a_scalar_is_refused(hook, reduction, strategy):
    model = _model()
    clipper = engine(strategy, loss_reduction=reduction)(model, C)
    losses_B = _losses(model(_batch()), hook, "between")
    with pytest.raises(LossReductionError, match=r"has changed a gradient \(before SinBackward0\)"):
        clipper.backward(getattr(losses_B, reduction)())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("place", ["outputs", "between", "losses"])
def test_hook_that_mixes_samples_from_the_third_step_on_is_refused(place, scalar, strategy):
    model = _model()
    clipper = engine(strategy)(model, C)
    mixes = _mixes if place != "losses" else lambda grad: grad.flip(0) * torch.arange(B)
    for step in range(3):
        clipper.reset()
        losses_B = _losses(model(_batch()), mixes if step == 2 else lambda grad: None, place)
        if step < 2:
            clipper.backward(losses_B.mean() if scalar else losses_B)
            continue
        with pytest.raises((LossReductionError, SampleMixingError)):
            clipper.backward(losses_B.mean() if scalar else losses_B)


@pytest.mark.parametrize("kind", ["register_prehook", "register_hook"])
@pytest.mark.parametrize("hook", [_mixes, _in_place])
def test_hook_on_a_node_below_a_scalar_is_refused(hook, kind):
    model = _model()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=C)
    between = model(_batch()).sin()
    # Of the second kind is given what the node has made of gradients, and those.
    getattr(between.grad_fn, kind)(lambda grads, *_: None if hook(grads[0]) is None else (hook(grads[0]),))
    with pytest.raises(LossReductionError, match=r"has changed a gradient \(before SinBackward0\)"):
        clipper.backward(between.square().sum(1).mean())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize(
    "way", ["looks", "a node's", "the module's", "removed", "retained", "on outputs", "returns it"]
)
def test_what_mixes_no_samples_is_exact(way, scalar, strategy):
    seen: list[Tensor] = []

    def losses(model, batch):
        output = model(batch["x"])
        between = output.sin()
        if way == "looks":
            between.register_hook(seen.append)
        elif way == "a node's":
            between.grad_fn.register_hook(lambda given, out: seen.append(given) or given)
        elif way == "removed":
            between.register_hook(_mixes).remove()
        elif way == "retained":
            between.retain_grad()
        elif way == "returns it":
            between.register_hook(lambda grad: grad)
        elif way == "on outputs":
            output.register_hook(lambda grad: grad * 3)
        return between.square().sum(1)

    model, batch = _model(), {"x": _batch()}
    if way == "the module's":
        # torch sets it on a node behind the outputs.
        model.register_full_backward_hook(lambda module, given, out: seen.append(out[0]))
    expected = clip_and_sum(per_sample_gradients(model, batch, losses, axes={}), C).clipped
    clipper = engine(strategy, loss_reduction="sum")(model, C)
    for _ in range(3):
        clipper.reset()
        seen.clear()
        losses_B = losses(model, batch)
        clipper.backward(losses_B.sum() if scalar else losses_B)
        torch.testing.assert_close({name: p.grad for name, p in trainable(model).items()}, expected)
    assert bool(seen) == (way in ("looks", "a node's", "the module's"))
