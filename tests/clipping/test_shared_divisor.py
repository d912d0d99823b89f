"""A mean over the tokens of the whole batch ties samples together: refused where samples count differently many."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghostclip.errors import LossReductionError
from tests.exactness.runs import engine

VOCABULARY = 7


class _WithLoss(nn.Module):
    """Returns its own loss, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY))

    def forward(self, ids, labels, weight=None):
        logits = self.head(ids)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight), logits


def _ready(strategy, ignored):
    model = _WithLoss().double()
    ids = torch.randint(VOCABULARY, (4, 6))
    labels = ids.clone()
    for sample, count in enumerate(ignored):
        labels[sample, :count] = -100
    return model, ids, labels, engine(strategy)(model, 0.5)


def test_samples_of_one_length(strategy):
    """Each sample's own mean and the mean of the batch are the same thing, up to the batch size."""
    model, ids, labels, clipper = _ready(strategy, (2, 2, 2, 2))
    clipper.backward(model(ids, labels)[0])
    by_scalar = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    losses = functional.cross_entropy(model(ids, labels)[1].mT, labels, reduction="none").sum(1) / 4
    clipper.backward(losses)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, by_scalar[name])


def test_samples_of_several_lengths(strategy):
    model, ids, labels, clipper = _ready(strategy, (0, 3, 0, 1))
    with pytest.raises(LossReductionError, match="between 3 and 6"):
        clipper.backward(model(ids, labels)[0])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("strategy", ["auto", "bookkeeping", "hooks"])
def test_plain_backward_of_the_models_own_loss(strategy):
    model, ids, labels, _ = _ready(strategy, (0, 3, 0, 1))
    with pytest.raises(LossReductionError, match="lengths"):
        model(ids, labels)[0].backward()
    assert all(p.grad is None for p in model.parameters())


def test_one_whole_sample_masked(strategy):
    """A sample without a target contributes nothing when each sample has its own mean."""
    model, ids, labels, clipper = _ready(strategy, (6, 0, 0, 0))
    counts = (labels != -100).sum(1).clamp(min=1)
    clipper.backward(functional.cross_entropy(model(ids, labels)[1].mT, labels, reduction="none").sum(1) / counts)
    assert clipper.per_sample_norms[0] == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())
