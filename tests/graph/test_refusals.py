"""What is not written as a graph: it is computed eagerly, and the reason names it; nothing is silently wrong."""

import queue
import random

import numpy as np
import pytest
import torch

import ghostclip
from ghostclip.graph import NoGraphError
from ghostclip.graph.compiled import Part, part_of
from ghostclip.graph.trace import analysed, inputs_of, trace
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


def test_adaptive_bounds_stay_eager():
    from ghostclip.clipping.bounds import QuantileAdaptation
    from ghostclip.clipping.policies import adaptive

    model = net()
    policy = adaptive(0.3, QuantileAdaptation(unclipped_num_std=1.0))
    step = ghostclip.GraphStep(ghostclip.GhostClipper(model, policy=policy, strategy="graph"), losses, options=ATEN)
    step(*batch())
    assert not step.graphs
    assert "adaptive bound" in next(iter(step.reasons))
