"""A loss that is computed for a few positions at a time: the slices' gradients of a sample are clipped as one."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghostclip import GhostClipper
from ghostclip.errors import InvalidOptionError, SampleMixingError
from ghostclip.losses import linear_cross_entropy

SAMPLES, TOKENS, VOCABULARY, WIDTH = 4, 7, 11, 6


class _Model(nn.Module):
    """Its forward ends before the head, as that of a model whose loss is computed in slices."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BT):
        return self.norm(self.layer(self.embedding(ids_BT)).tanh())


def _model(*, tied, dtype=torch.float64):
    torch.manual_seed(0)
    return _Model(tied=tied).to(dtype)


def _batch(samples=SAMPLES):
    return torch.randint(VOCABULARY, (2, samples, TOKENS), generator=torch.Generator().manual_seed(2)).unbind()


def _losses(head, h_BTI, y_BT):
    return functional.cross_entropy(head(h_BTI).transpose(1, 2), y_BT, reduction="none").sum(1)


def _in_chunks(model, x, y, positions, bound=0.7, **options):
    model.zero_grad(set_to_none=True)
    with GhostClipper(model, max_grad_norm=bound, **options) as clipper:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            clipper.reset()
            found = clipper.backward_in_chunks(
                model(x), lambda h, at: _losses(model.head, h, y[:, at]), positions=positions
            )
        return found, [p.grad for p in model.parameters()], clipper.per_sample_norms


class _Whole(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.head(self.model(x))


def _at_once(model, x, y, bound=0.7):
    model.zero_grad(set_to_none=True)
    with GhostClipper(_Whole(model), max_grad_norm=bound) as clipper:
        losses = functional.cross_entropy(clipper.model(x).transpose(1, 2), y, reduction="none").sum(1)
        clipper.backward(losses)
        return losses.detach(), [p.grad for p in model.parameters()], clipper.per_sample_norms


@pytest.mark.parametrize("strategy", ["auto", "bookkeeping", "hooks"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("positions", [1, 3, 100])
def test_sums_are_those_of_one_backward(positions, tied, strategy):
    (x, y), model = _batch(), _model(tied=tied)
    wanted = _at_once(model, x, y)
    found = _in_chunks(model, x, y, positions, strategy=strategy)
    assert (wanted[2] > 0.7).any()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def test_a_head_without_logits_may_be_what_is_left():
    """Its tiles hold nothing of a slice until the end."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

        def forward(self, h, y):
            return linear_cross_entropy(h, self.weight, y).sum(1)

    (x, y), model = _batch(), _model(tied=False)
    model.head = Head().double()
    with GhostClipper(model, max_grad_norm=0.7) as clipper:
        clipper.backward_in_chunks(model(x), lambda h, at: model.head(h, y[:, at]), positions=3)
        found = [p.grad for p in model.parameters()], clipper.per_sample_norms
    plain = nn.Linear(WIDTH, VOCABULARY, bias=False).double()
    plain.weight = model.head.weight
    model.head = plain
    wanted = _at_once(model, x, y)[1:]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"strategy": "ghost"}, {"strategy": "fast"}, {"memory_budget": 0.5}])
def test_what_runs_two_backwards_is_refused(options):
    (x, y), model = _batch(), _model(tied=False)
    with pytest.raises(InvalidOptionError, match="with backward_in_chunks"):
        _in_chunks(model, x, y, 3, **options)


def test_a_slice_that_mixes_samples_is_refused():
    (x, y), model = _batch(), _model(tied=False)
    with GhostClipper(model, max_grad_norm=1.0) as clipper, pytest.raises(SampleMixingError):
        clipper.backward_in_chunks(model(x), lambda h, at: _losses(model.head, h - h.mean(0), y[:, at]), positions=3)
