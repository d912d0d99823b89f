"""What is not written as a graph: it is computed eagerly, and the reason names it; nothing is silently wrong."""

import queue
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.errors import InvalidOptionError
from ghostclip.factors import Dense
from ghostclip.graph import GraphOptions, NoGraphError
from ghostclip.graph.axes import analysed
from ghostclip.graph.compiled import Part, part_of
from ghostclip.graph.sums import Sum, linear
from ghostclip.graph.trace import inputs_of, trace
from tests.graph.steps import ATEN, Net, batch, eager_sums, losses, net, step_of, sums


def _analysed(model, loss=losses):
    tree = (batch(4), {})
    more = part_of(tree, Part(0, 4, 5), 4, lambda x: 0, padded=True)
    inputs = inputs_of(model, tree, lambda x: 0)
    return analysed(trace(model, loss, inputs), trace(model, loss, inputs_of(model, more, lambda x: 0)), inputs, 4)


def _by_chance(generator):
    return lambda h: h * generator.random()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        pytest.param(lambda h: h - h.mean(0), "follows B", id="centred over the batch"),
        pytest.param(lambda h: h - h.amax(0), "amax.*loses the sample axis", id="below the largest"),
        pytest.param(lambda h: h.softmax(0), "softmax.*runs along the samples", id="softmax over the batch"),
        pytest.param(lambda h: h.cumsum(0), "cumsum.*runs along the samples", id="cumulated"),
        pytest.param(lambda h: h.flip(0), "flip.*runs along the samples", id="turned round"),
        pytest.param(lambda h: h.t().reshape(h.shape), "they mix", id="read in another order"),
        pytest.param(lambda h: (h @ h.t()).softmax(1) @ h, "two axes", id="samples attend to each other"),
        pytest.param(lambda h: h / h.shape[0], "follows B", id="divided by the batch size"),
        pytest.param(lambda h: h[h.sum(1).argsort()], "across samples by their values", id="sorted by values"),
        pytest.param(lambda h: h * float(h.sum()), "cannot be traced", id="a number that is read"),
        pytest.param(lambda h: h * random.random(), "Python's", id="numbers of Python's generator"),
        pytest.param(_by_chance(np.random.default_rng(0)), "its own", id="numbers of a generator of its own"),
        pytest.param(lambda h: h[h > 0].sum() + h, "depends on data", id="a shape that depends on data"),
    ],
)
def test_what_mixes_or_cannot_be_known_is_refused_by_name(how, named):
    with pytest.raises(NoGraphError, match=named):
        _analysed(net(how=how))


def test_a_logsumexp_of_each_sample_mixes_nothing():
    _analysed(net(how=lambda h: h - h.logsumexp(1)[:, None]))


class _Counting(Net):
    """Counts its forwards, which makes outputs smaller."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x) / self.count


def test_a_buffer_that_is_written_is_refused():
    with pytest.raises(NoGraphError, match="writes to a buffer"):
        _analysed(_Counting().double())


def test_a_model_that_counts_its_forwards_is_computed_eagerly():
    """The loss is known, and proved on other batches: what that writes to the model is put back."""
    torch.manual_seed(1)
    model = _Counting().double()
    step = step_of(model)
    step(*batch())
    want, _ = eager_sums(net(), *batch())
    torch.testing.assert_close(sums(model), want)
    step(*batch())
    assert model.count == 2


def test_what_a_forward_leaves_on_modules_is_taken_back():
    class Caching(Net):
        def forward(self, x):
            self.cache = torch.arange(x.shape[1], dtype=x.dtype)
            return super().forward(x + self.cache)

    model = Caching().double()
    _analysed(model)
    assert not hasattr(model, "cache")


def test_hooks_that_a_forward_adds_once_are_taken_back_with_what_says_that_they_are_there():
    class Listening(Net):
        def forward(self, x):
            if not hasattr(self, "listens"):
                self.first.register_forward_hook(lambda module, args, output: output + 1)
                self.listens = True
            return super().forward(x)

    model = Listening().double()
    _analysed(model)
    assert not hasattr(model, "listens")
    assert not model.first._forward_hooks


def test_eager_batches_are_exact_and_say_why(caplog):
    model = net(how=lambda h: h * 2 if float(h[0, 0]) > 5 else h)
    step = step_of(model)
    for _ in range(2):
        step(*batch())
    want, _ = eager_sums(net(how=model.how), *batch())
    torch.testing.assert_close(sums(model), 2 * want)
    (reason,) = step.reasons
    assert step.reasons[reason] == 2
    assert "cannot be traced" in reason
    assert caplog.text.count("computed eagerly") == 1


def test_a_graph_that_differs_from_the_eager_engine_is_given_up():
    # Random numbers that a global decides on: the graph keeps what it was traced with.
    # No list: what a forward reaches is put back after runs that are not the user's.
    calls = queue.SimpleQueue()

    def changing(h):
        calls.put(None)
        return h * (1.0 + (calls.qsize() > 2))

    model = net(how=changing)
    step = step_of(model)
    step(*batch())
    assert not step.graphs
    assert "does not agree" in next(iter(step.reasons))


@pytest.mark.parametrize(
    "options",
    [{"backend": "tvm"}, {"sizes": (1,)}, {"sizes": ()}, {"check_every": -1}, {"mode": "x", "backend": "aten"}],
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(InvalidOptionError):
        GraphOptions(**options)


def test_strategies_without_a_graph_are_refused():
    with pytest.raises(InvalidOptionError, match="strategy='hooks'"):
        ghostclip.GraphStep(ghostclip.GhostClipper(net(), max_grad_norm=1.0, strategy="hooks"), losses)


def test_losses_of_another_shape_are_refused():
    step = step_of(net(), loss=lambda m, x, y: functional.cross_entropy(m(x), y).expand(2, 2))
    with pytest.raises(ghostclip.errors.LossReductionError):
        step(*batch())
    assert "not one entry per sample" in next(iter(step.reasons))


def test_adaptive_bounds_stay_eager():
    from ghostclip.clipping.bounds import QuantileAdaptation
    from ghostclip.clipping.policies import adaptive

    model = net()
    policy = adaptive(0.3, QuantileAdaptation(unclipped_num_std=1.0))
    step = ghostclip.GraphStep(ghostclip.GhostClipper(model, policy=policy, strategy="graph"), losses, options=ATEN)
    step(*batch())
    assert not step.graphs
    assert "adaptive bound" in next(iter(step.reasons))


def test_nn_module_of_the_loss_may_have_buffers():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), reduction="none")
    model = net()
    step = step_of(model, loss=lambda m, x, y: weighted(m(x), y))
    step(*batch())
    assert step.graphs[0].verified


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        pytest.param(torch.ops.aten.div.Tensor, lambda own, one: (one, own), id="divided by"),
        pytest.param(torch.ops.aten.tanh_backward.default, lambda own, one: (one, own), id="no gradient that comes in"),
    ],
)
def test_what_is_not_linear_in_a_sum_over_samples_is_refused(operation, arguments):
    own, one = Sum(Dense(torch.rand(4, 3))), torch.rand(3)
    with pytest.raises(NoGraphError, match="not linear"):
        linear(operation, arguments(own, one), {}, (3,))
    found = linear(operation, arguments(one, own), {}, (3,))
    assert found.per_sample().shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_of_every_token_s_experts_are_not_more_than_memory_should_hold(dtype, monkeypatch):
    def losses_of(model, x, y):
        weights = model.first.weight.to(dtype).mT[x.argmax(1)]
        return (model(x) * weights[:, :3]).sum(1)

    model = net()
    inputs = inputs_of(model, (batch(), {}), lambda x: 0)
    trace(model, losses_of, inputs)
    monkeypatch.setattr("ghostclip.graph.trace._MOST_TAKEN", 40)
    with pytest.raises(NoGraphError, match="experts' weights, once for each token"):
        trace(model, losses_of, inputs)
