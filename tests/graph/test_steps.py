"""Batches of any size, samples that are not finite, models that change, randomness, and what is counted."""

import dataclasses
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.errors import LossReductionError
from ghostclip.graph import GraphOptions
from tests.graph.steps import ATEN, Net, batch, eager_sums, losses, net, step_of, sums, warmed


@pytest.mark.parametrize("samples", [2, 5, 6, 7, 11])
def test_padding_samples_add_nothing(samples):
    model = net()
    step = warmed(model, options=GraphOptions(backend="aten", sizes=(6,)))
    data = batch(samples)
    losses_B = step(*data)
    want, norms_B = eager_sums(model, *data)
    torch.testing.assert_close(sums(model), want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(losses_B, losses(model, *data).detach())
    assert step.clipper.batch_size == len(step.clipper.per_sample_norms) == (samples - 1) % 6 + 1
    torch.testing.assert_close(step.clipper.per_sample_norms, norms_B[-step.clipper.batch_size :])
    assert step.clipper.rows_seen == (samples,)
    assert step.clipper.backward_passes == 1
    assert not step.reasons
    assert len(step.graphs) == 1


def test_sums_are_kept_where_the_next_run_overwrites_what_a_graph_returned(monkeypatch):
    """As CUDA graphs do; here a graph that always writes to the same memory."""

    def overwriting(graph, inputs):
        held = []

        def run(*tensors):
            found = graph(*tensors)
            held[:] = held or [x.clone() for x in found]
            return [one.copy_(x) for one, x in zip(held, found, strict=True)]

        return run

    monkeypatch.setattr(GraphOptions, "uses_cuda_graphs", lambda self: True)
    model, parts = net(), [batch(seed=seed) for seed in range(3)]
    step = warmed(model, options=GraphOptions(backend=overwriting))
    losses_SB = [step(*data) for data in parts]
    want = sum(eager_sums(model, *data)[0] for data in parts)
    torch.testing.assert_close(sums(model), want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(losses_SB, [losses(model, *data).detach() for data in parts])


def test_padding_shows_nothing_of_a_graph():
    # One sample beside padding cannot be confused with another one.
    step = step_of(net())
    step.take_sizes((4,))
    step(*batch(3))
    assert [graph.verified for graph in step.graphs] == [False]
    step(*batch(4))
    assert [graph.verified for graph in step.graphs] == [True]
    step.options = dataclasses.replace(step.options, check_every=1)
    step(*batch(3))
    assert [graph.verified for graph in step.graphs] == [True]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_any_number_of_samples(mode):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.last = nn.EmbeddingBag(9, 4, mode=mode), nn.Linear(4, 3)

        def forward(self, ids):
            return self.last(self.bags(ids))

    torch.manual_seed(0)
    model = Bags().double()
    step = step_of(model)
    for samples in (8, 7, 12, 13, 9, 6, 10):
        ids, labels = torch.randint(9, (samples, 6)), torch.randint(3, (samples,))
        expected, _ = eager_sums(model, ids, labels)
        step(ids, labels)
        torch.testing.assert_close(sums(model), expected, rtol=1e-10, atol=1e-12)
        step.clipper.reset()


@pytest.mark.parametrize("samples", [0, 1])
def test_batches_without_two_samples_are_eager(samples):
    model = net()
    step = warmed(model)
    assert step(*batch(samples)).shape == (samples,)
    want, _ = eager_sums(model, *batch(samples))
    torch.testing.assert_close(sums(model), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_contributes_nothing_and_is_counted(value):
    model = net()
    step = warmed(model)
    x, y = batch()
    x[2, 1] = value
    step(x, y)
    rest = [0, 1, 3, 4, 5]
    want, _ = eager_sums(model, x[rest], y[rest])
    torch.testing.assert_close(sums(model), want, rtol=1e-12, atol=1e-14)
    assert step.clipper.non_finite_samples == 1
    assert step.reasons


def test_ill_conditioned_samples_are_measured_by_the_eager_engine():
    # Positions that nearly cancel: most of the norm is rounding.
    class Cancelling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.layer(x)

    def loss(model, x, sign):
        return (model(x) * sign).sum((1, 2))

    torch.manual_seed(0)
    model = Cancelling()
    x, sign = torch.randn(4, 8, 64), torch.randn(4, 8, 1)
    step = step_of(model, loss=loss, max_grad_norm=1.0)
    step(x, sign)
    step.clipper.reset()
    assert step.graphs[0].verified
    x[1, 1::2], sign[1, 1::2] = x[1, ::2] * (1 + 1e-7), -sign[1, ::2]
    step(x, sign)
    assert "ill-conditioned" in next(iter(step.reasons))
    torch.testing.assert_close(sums(model), eager_sums(model, x, sign, max_grad_norm=1.0, loss=loss)[0])


def _frozen(model):
    model.first.weight.requires_grad_(False)


def _less_dropout(model):
    model.dropout.p = 0.5


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_frozen, id="a parameter is frozen"),
        pytest.param(lambda model: model.eval(), id="evaluation mode"),
        pytest.param(_less_dropout, id="an attribute"),
        pytest.param(lambda model: setattr(model, "how", torch.relu), id="a function"),
    ],
)
def test_a_changed_model_is_traced_anew(change):
    model = net(p=0.2)
    step = warmed(model)
    change(model)
    torch.manual_seed(3)
    step(*batch())
    assert len(step.graphs) in (1, 2), step.reasons
    assert step.graphs[-1].runs == 1
    torch.manual_seed(3)
    assert all((p.grad is None) is not p.requires_grad for p in model.parameters())


class _Setting:
    """Holds what a forward reads, as users' configurations do."""

    def __init__(self, scale):
        self.scale = scale


def _twice(inner, x):
    return 2 * Net.forward(inner, x)


def _doubles(module, inputs, output):
    return 2 * output


def _trebles(module, inputs, output):
    return 3 * output


def _put_another_hook(model):
    model.hook.remove()
    model.inner.register_forward_hook(_trebles)


class _Doubled(Net):
    def forward(self, x):
        return 2 * super().forward(x)


class _Held(nn.Module):
    """Scales by what is held in several ways."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.several, self.named = [1.0, {"deep": [1.0]}], {"scale": 1.0}
        self.setting = _Setting(_Setting(1.0))
        self.array, self.how = np.ones(2), torch.relu
        self.tensor = torch.ones(3)
        self.hook = self.inner.register_forward_hook(_doubles)

    def forward(self, x):
        held = self.several[0] * self.several[1]["deep"][0] * self.named["scale"] * self.setting.scale.scale
        held = held * self.tensor
        return self.how(self.inner(x) * held * float(self.array[1]))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.several.__setitem__(0, 2.0), id="an entry of a list"),
        pytest.param(lambda model: model.several[1]["deep"].__setitem__(0, 2.0), id="a list in a dict in a list"),
        pytest.param(lambda model: setattr(model, "several", [2.0, {"deep": [1.0]}]), id="another list"),
        pytest.param(lambda model: model.named.update(scale=2.0), id="an entry of a dict"),
        pytest.param(lambda model: setattr(model.setting.scale, "scale", 2.0), id="an object in an object"),
        pytest.param(lambda model: setattr(model, "setting", _Setting(_Setting(2.0))), id="another object"),
        pytest.param(_put_another_hook, id="another hook"),
        pytest.param(lambda model: model.array.__setitem__(1, 2.0), id="an array"),
        pytest.param(lambda model: setattr(model, "how", torch.tanh), id="a function"),
        pytest.param(lambda model: setattr(model, "tensor", torch.arange(3.0)), id="another tensor"),
        pytest.param(lambda model: setattr(model.inner, "forward", MethodType(_twice, model.inner)), id="a method"),
        pytest.param(lambda model: setattr(model.inner, "__class__", _Doubled), id="another class"),
    ],
)
def test_what_a_model_holds_is_watched(change):
    model = _Held()
    step = warmed(model)
    change(model)
    step(*batch(seed=1))
    assert step.graphs[-1].runs == 1
    torch.testing.assert_close(sums(model), eager_sums(model, *batch(seed=1))[0])


class _Weighed(nn.Module):
    """Squared losses whose terms have weights that the samples have in common, under a temperature."""

    def __init__(self):
        super().__init__()
        self.temperature = 1.0
        self.register_buffer("weights", torch.ones(3))

    def forward(self, model, x, y, weights=None):
        own = self.weights if weights is None else weights
        return ((model(x) * self.temperature - functional.one_hot(y, 3)).square() * own).sum(1)


def test_what_a_loss_holds_is_watched():
    model, loss = net(), _Weighed()
    step = warmed(model, loss=loss)
    loss.temperature = 3.0
    step(*batch(seed=1))
    torch.testing.assert_close(sums(model), eager_sums(model, *batch(seed=1), loss=loss)[0])


class _Counted(_Weighed):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, model, x, y):
        self.calls += 1
        return super().forward(model, x, y)


def test_a_loss_that_holds_something_else_in_every_batch_is_computed_eagerly():
    model, loss = net(), _Counted()
    step = step_of(model, loss=loss)
    for seed in range(5):
        step.clipper.reset()
        step(*batch(seed=seed))
    assert step.reasons == {"the model or its loss holds something else in every batch": 2}
    torch.testing.assert_close(sums(model), eager_sums(model, *batch(seed=4), loss=_Weighed())[0])


@pytest.mark.parametrize("given", [True, False], ids=["given beside the batch", "held by the loss"])
def test_weights_in_common_that_change_are_refused_as_by_the_eager_engine(given):
    model, loss = net(), _Weighed()
    step = step_of(model, loss=loss)
    for seed in range(2):
        step(*batch(seed=seed), *[torch.ones(3)][: int(given)])
    assert step.graphs[0].runs == 2
    loss.weights.copy_(torch.arange(3.0))
    with pytest.raises(LossReductionError, match="held other values in earlier steps"):
        step(*batch(), *[torch.arange(3.0)][: int(given)])


def test_a_tensor_in_common_that_is_as_long_as_a_batch_is_not_cut():
    def far(model, x, known):
        return torch.cdist(model(x), known).softmax(1)[:, 0]

    model, known = net(), torch.randn(10, 3, dtype=torch.float64)
    step = step_of(model, loss=far)
    step(batch(8)[0], known)
    step.clipper.reset()
    x, _ = batch(10)
    step(x, known)
    halves = [eager_sums(model, half, known, loss=far)[0] for half in x.split(5)]
    torch.testing.assert_close(sums(model), sum(halves))


def test_new_values_of_parameters_are_used():
    model = net()
    step = warmed(model)
    with torch.no_grad():
        model.first.weight.mul_(3.0)
    model.second = model.second.double()
    step(*batch())
    torch.testing.assert_close(sums(model), eager_sums(model, *batch())[0])
    assert step.graphs[0].runs == 2


def test_another_bound_needs_another_graph():
    model = net()
    step = warmed(model)
    step.clipper.max_grad_norm = 0.05
    for _ in range(2):
        step.clipper.reset()
        step(*batch())
    torch.testing.assert_close(sums(model), eager_sums(model, *batch(), max_grad_norm=0.05)[0])
    assert len(step.graphs) == 2
    assert step.clipper.sensitivity() == 0.05


def test_dropout_draws_what_the_eager_engine_draws():
    step, data = warmed(model := net(p=0.5)), batch()
    torch.manual_seed(9)
    step(*data)
    got = sums(model)
    torch.manual_seed(9)
    torch.testing.assert_close(got, eager_sums(model, *data)[0])


def test_what_else_the_loss_returns_comes_back():
    model = net()
    step = step_of(model, loss=lambda m, x, y: ((out := m(x)).square().sum(1) + y, {"logits": out, "name": "kept"}))
    for samples in (6, 4):
        x, y = batch(samples)
        losses_B, extra = step(x, y)
        torch.testing.assert_close(extra["logits"], model(x).detach())
        assert extra["name"] == "kept"
        assert losses_B.shape == (samples,)
        assert not extra["logits"].requires_grad


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_clip_policies_are_those_of_the_clipper(clipping):
    from ghostclip.clipping import policies

    policy = policies.per_layer(0.3) if clipping == "per_layer" else policies.automatic(0.3)
    model = net()
    step = ghostclip.GraphStep(ghostclip.GhostClipper(model, policy=policy, strategy="graph"), losses, options=ATEN)
    for _ in range(2):
        step.clipper.reset()
        step(*batch())
    got, other = sums(model), net()
    with ghostclip.GhostClipper(other, policy=policy) as clipper:
        clipper.backward(losses(other, *batch()))
    torch.testing.assert_close(got, sums(other))
    assert step.graphs[0].runs == 2


def test_autocast_is_part_of_the_graph():
    model = net().float()
    step = step_of(model)
    data = batch(dtype=torch.float32)
    for _ in range(2):
        step.clipper.reset()
        with torch.autocast("cpu", torch.bfloat16):
            step(*data)
    assert step.graphs[0].runs == 2
    assert any("bfloat16" in str(node.meta.get("val")) for node in step.graphs[0].graph.graph.nodes)
    with ghostclip.GhostClipper(other := net().float(), max_grad_norm=0.3) as clipper:
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses(other, *data)
        clipper.backward(loss)
    torch.testing.assert_close(sums(model), sums(other), rtol=3e-2, atol=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_inductor_computes_what_operations_one_by_one_do(p):
    data, found = batch(), []
    for options in (GraphOptions(), ATEN):
        step = warmed(model := net(p=p), options=options)
        torch.manual_seed(4)
        step(*data)
        found.append(sums(model))
        assert not step.reasons
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
