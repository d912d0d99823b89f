"""What weighs samples by the labels of the batch is refused once a batch has several labels, however rare they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError


def _each(logits, y):
    return functional.cross_entropy(logits, y, reduction="none")


def _balanced(logits, y):
    return _each(logits, y) * (len(y) / torch.bincount(y, minlength=3).clamp(min=1).to(logits.dtype))[y]


def _of_positives(logits, y):
    weight = (y == 0).sum() / (y > 0).sum().clamp(min=1)
    return _each(logits, y) * torch.where(y > 0, weight, torch.ones_like(weight))


def _own(logits, y):
    return _each(logits, y) * torch.tensor([1.0, 30.0, 9.0])[y]


_WEIGHTS = {"balanced": _balanced, "positives over negatives": _of_positives, "own": _own}


class _WithLosses(nn.Module):
    def __init__(self, model, losses):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, x, y):
        return self.losses(self.model(x), y)


def _steps(losses, where, seed, rare, change=lambda x, y: (x, y)):
    """Yield the labels of each batch whose step was released, in a training that takes the losses somewhere."""
    torch.manual_seed(seed)
    x, y = torch.randn(400, 5), torch.where(torch.rand(400) < 0.04, rare, 0)
    model = nn.Linear(5, 3)
    if where == "model":
        model = _WithLosses(model, losses)
    criterion = {"criterion": lambda logits, y: losses(logits, y).mean()} if where == "criterion" else {}
    model, optimizer, *known, loader = ghostclip.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=14), compile=False, **criterion,
    )  # fmt: skip
    for batch in loader:
        optimizer.zero_grad()
        inputs, labels = change(*batch)
        if where == "model":
            model(inputs, labels).mean().backward()
        elif known:
            known[0](model(inputs), labels).backward()
        else:
            losses(model(inputs), labels).mean().backward()
        optimizer.step()
        yield labels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("where", ["loop", "criterion", "model"])
@pytest.mark.parametrize("weights", ["balanced", "positives over negatives"])
def test_weights_by_the_batchs_labels_are_refused_where_it_has_several(weights, where, seed):
    """Most batches have one label: they look right, and are."""
    released = []
    with pytest.raises((LossReductionError, SampleMixingError), match="changed"):
        released.extend(_steps(_WEIGHTS[weights], where, seed, rare=1))
    assert not any(labels.any() for labels in released), "samples had each other's weights in a step"


@pytest.mark.parametrize("where", ["loop", "criterion", "model"])
@pytest.mark.parametrize("rare", [0, 1, 2])
def test_weights_of_ones_own_label_are_exact(where, rare):
    """Also where no batch ever has another label."""
    assert len(list(_steps(_own, where, 0, rare))) == 29


def test_samples_may_be_put_in_order_while_labels_are_alike():
    """Also in a step that is looked at once more, where the loop kept something of the one before."""
    for seed in range(12):
        kept = []

        def in_order(x, y, kept=kept):
            # The first batch was, by chance.
            order = x[:, 0].argsort() if kept else torch.arange(len(x))
            kept[:] = [x.mean(1)]
            return x[order], y[order]

        assert len(list(_steps(_own, "loop", seed, 1, in_order))) == 29
