"""In which form a graph keeps gradients, how many operations it is made of, and what it takes of memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.kernels import gram, runtime
from tests.graph.steps import ATEN, eager_sums, sums


def _norms(a, g):
    return list(gram.symmetric_gram(a, g))


@pytest.mark.parametrize("positions", [31, 64, 300, 1100])
def test_a_gram_that_is_written_down_is_bounded(positions):
    a, g = torch.randn(3, positions, 40), torch.randn(3, positions, 33)
    with runtime.none():
        value_N, error_N, *_ = _norms(a, g)
    exact_N = torch.einsum("nto,nti->noi", g.double(), a.double()).square().sum((1, 2))
    assert ((value_N.double() - exact_N).abs() <= error_N).all()


class Wide(nn.Module):
    """Layers whose gradients are formed, whose Gram is, and an embedding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.narrow, self.wide = nn.Linear(16, 24), nn.Linear(24, 200)

    def forward(self, ids):
        return self.wide(torch.tanh(self.narrow(self.token(ids))))


def _token_losses(model, ids, y):
    return functional.cross_entropy(model(ids).flatten(0, 1), y.flatten(), reduction="none").view(len(ids), -1).mean(1)


@pytest.mark.parametrize("room", [0, None], ids=["factors", "formed"])
def test_sums_are_the_same_in_both_forms(room, monkeypatch):
    if room is not None:
        monkeypatch.setattr("ghostclip.graph.rewrite.peak_of_graph", lambda graph: room)
    torch.manual_seed(0)
    model, data = Wide().double(), (torch.randint(11, (5, 12)), torch.randint(200, (5, 12)))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy="graph")
    step = ghostclip.GraphStep(clipper, _token_losses, options=ATEN)
    for _ in range(2):
        clipper.reset()
        step(*data)
    assert step.graphs[0].runs == 2
    want, norms_B = eager_sums(model, *data, max_grad_norm=0.1, loss=_token_losses)
    torch.testing.assert_close(sums(model), want, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(clipper.per_sample_norms, norms_B)


def _long_sums(step):
    """Sums of more than 256 numbers in float32."""
    for node in step.graphs[0].graph.graph.nodes:
        if "aten.sum" in str(node.target):
            given, value = node.args[0].meta["val"], node.meta["val"]
            if given.dtype == value.dtype == torch.float32 and given.numel() > 256 * value.numel():
                yield node


def _equal_terms(backend):
    """One wide layer whose Gram matrices have equal entries only."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="graph")
    step = ghostclip.GraphStep(
        clipper, lambda m, x, y: (m(x) * y).sum((1, 2)), options=ghostclip.GraphOptions(backend=backend)
    )
    data = torch.full((4, 192, 512), 0.1) + torch.rand(4, 1, 1), torch.full((4, 192, 512), 0.3) + torch.rand(4, 1, 1)
    for _ in range(2):
        clipper.reset()
        step(*data)
    assert step.graphs[0].runs == 2
    exact_B = torch.einsum("bto,bti->boi", *(x.double() for x in reversed(data))).flatten(1).norm(dim=1)
    return step, exact_B


def test_long_sums_are_in_double_precision():
    step, exact_B = _equal_terms("aten")
    assert not list(_long_sums(step))
    assert (step.clipper.per_sample_norms.double() >= exact_B * (1 - 1e-7)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_norms_of_equal_terms_are_not_too_small():
    step, exact_B = _equal_terms("inductor")
    assert not step.reasons
    assert (step.clipper.per_sample_norms.double() >= exact_B * (1 - 1e-7)).all()
    assert sums(step.clipper.model).double().norm() <= 4 * (1 + 1e-5)
