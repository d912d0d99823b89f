"""A mean over the tokens of the whole batch ties samples together: refused where samples count differently many."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghostclip.errors import LossReductionError, SampleMixingError
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


def test_class_weights(strategy):
    """The divisor is then the sum of the weights of all targets."""
    model, ids, labels, clipper = _ready(strategy, (0, 0, 0, 0))
    labels[0] = 0
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)
    with pytest.raises(LossReductionError, match="own positions"):
        clipper.backward(model(ids, labels, weight)[0])


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


def test_mean_over_part_of_the_batch(strategy):
    """Two of four samples: the declared mean over samples would double every norm."""
    model, ids, labels, clipper = _ready(strategy, (0, 0, 0, 0))
    logits = model(ids, labels)[1]
    for loss in (
        functional.cross_entropy(logits[:2, 0], labels[:2, 0]),
        logits[:2].square().mean((1, 2))[:1].mean(),
        functional.cross_entropy(logits.mT, labels, reduction="none")[labels > 1][:7].mean(),
    ):
        with pytest.raises(LossReductionError, match="batch of 4 samples"):
            clipper.backward(loss)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["centred", "contrastive"])
def test_loss_that_compares_samples(strategy, kind):
    """The model keeps samples apart, the loss does not."""
    model = nn.Linear(5, 4).double()
    clipper = engine(strategy)(model, 1.0)
    outputs = model(torch.randn(4, 5, dtype=torch.float64))
    if kind == "centred":
        losses = (outputs - outputs.mean(0)).square().sum(1)
    else:
        losses = functional.cross_entropy(outputs @ outputs.T, torch.arange(4), reduction="none")
    with pytest.raises(SampleMixingError, match="loss of one sample"):
        clipper.backward(losses)
    assert all(p.grad is None for p in model.parameters())
