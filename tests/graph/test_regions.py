"""Parts of a graph that recur from layer to layer: when they are graphs of their own, and what they compute."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip import _torch
from ghostclip.graph import rewrite
from ghostclip.graph.compiled import GraphOptions
from tests.graph.steps import eager_sums, sums

CALL = _torch.region_call()


class Blocks(nn.Module):
    """Equal layers whose norms are those of Gram matrices, and one of another size."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(layers))
        self.last = nn.Linear(96, 80)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def _losses(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(len(x), -1).mean(1)


def _batch(samples, dtype):
    torch.manual_seed(3)
    return torch.randn(samples, 16, 96, dtype=dtype), torch.randint(80, (samples, 16))


def _step(layers, dtype=torch.float64, **options):
    torch.manual_seed(0)
    clipper = ghostclip.GhostClipper(Blocks(layers).to(dtype), max_grad_norm=0.5, strategy="graph")
    return ghostclip.GraphStep(clipper, _losses, options=GraphOptions(sizes=(5,), **options))


def _sums(step, *batch):
    step.clipper.reset()
    step(*batch)
    return sums(step.clipper.model).clone()


def _calls(graph):
    return [node for node in graph.graph.nodes if node.target is CALL]


@pytest.fixture
def uncompiled(monkeypatch):
    """What is compiled by Inductor runs operation by operation, graphs within it included."""
    monkeypatch.setattr(GraphOptions, "compiled", lambda self, graph, inputs: graph)
    monkeypatch.setattr(GraphOptions, "saves", lambda self: False)


@pytest.mark.parametrize("layers", [rewrite.FEWEST - 1, rewrite.FEWEST])
def test_layers_of_one_form_share_one_graph_where_there_are_many(layers, uncompiled):
    step, batch = _step(layers), _batch(5, torch.float64)
    for _ in range(2):
        found = _sums(step, *batch)
    (compiled,) = step.graphs
    calls = _calls(compiled.graph)
    assert len(calls) == (layers if layers >= rewrite.FEWEST else 0)
    assert len({node.args[0].target for node in calls}) == min(1, len(calls))
    assert compiled.runs == 2
    assert not step.reasons
    want, norms_B = eager_sums(step.clipper.model, *batch, max_grad_norm=0.5, loss=_losses)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(step.clipper.per_sample_norms, norms_B)


def test_one_sample_moves_the_sum_by_the_bound_at_most(uncompiled):
    step, batch = _step(rewrite.FEWEST, torch.float32), _batch(5, torch.float32)
    _sums(step, *batch)
    whole = _sums(step, *batch)
    for left_out in range(5):
        others = [x[torch.arange(5) != left_out] for x in batch]
        move = (whole - _sums(step, *others)).double().norm()
        assert 0.1 < move <= 0.5 * (1 + 2.0**-20)
    assert not step.reasons


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("compiler")
def test_compiled_regions_are_exact_and_found_on_disk():
    batch = _batch(5, torch.float32)
    for found_on_disk in (False, True):
        step = _step(rewrite.FEWEST, torch.float32)
        for _ in range(2):
            found = _sums(step, *batch)
        assert step.graphs[0].runs == 2
        assert (step.graphs[0].graph is None) is found_on_disk
        assert found_on_disk or _calls(step.graphs[0].graph)
        want, _ = eager_sums(step.clipper.model, *batch, max_grad_norm=0.5, loss=_losses)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
