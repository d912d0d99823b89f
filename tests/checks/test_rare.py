"""What weighs samples by the labels of the batch is refused once a batch has several labels, however rare they are."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.checks.dependence import alike, rare_sample
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
    if where in ("model", "scalar of a model"):
        model = _WithLosses(model, losses if where == "model" else lambda logits, y: losses(logits, y).mean())
    criterion = {"criterion": lambda logits, y: losses(logits, y).mean()} if where == "criterion" else {}
    model, optimizer, *known, loader = ghostclip.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=14), **criterion,
    )  # fmt: skip
    assert len(known) == (where == "criterion")
    for batch in loader:
        optimizer.zero_grad()
        inputs, labels = change(*batch)
        if where in ("model", "scalar of a model"):
            model(inputs, labels).mean().backward()
        elif known:
            known[0](model(inputs), labels).backward()
        else:
            losses(model(inputs), labels).mean().backward()
        optimizer.step()
        yield labels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("where", ["loop", "criterion", "model", "scalar of a model"])
@pytest.mark.parametrize("weights", ["balanced", "positives over negatives"])
def test_weights_by_the_batchs_labels_are_refused_where_it_has_several(weights, where, seed):
    """Most batches have one label: they look right, and are."""
    released, words = [], "half of the samples it is another" if where == "scalar of a model" else "changed"
    with pytest.raises((LossReductionError, SampleMixingError), match=words):
        released.extend(_steps(_WEIGHTS[weights], where, seed, rare=1))
    assert not any(labels.any() for labels in released), "samples had each other's weights in a step"


@pytest.mark.parametrize("seed", range(4))
def test_weights_by_an_earlier_batchs_labels_are_refused_in_the_next(seed):
    shares, released = [torch.ones(3)], []

    def weighted(logits, y):
        before, shares[0] = shares[0], 0.5 * shares[0] + functional.one_hot(y, 3).float().mean(0)
        return _each(logits, y) * before[y]

    with pytest.raises(LossReductionError, match="follows what the loop kept"):
        released.extend(_steps(weighted, "loop", seed, rare=1))
    assert not any(labels.any() for labels in released[:-1])


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("size", [7, 8])
def test_wherever_the_rare_samples_lie(size, scalar):
    """One or two among others: also where halves of the batch have equal shares of them."""
    for places in combinations_with_replacement(range(size), 2):
        x, y = torch.randn(size, 5), torch.zeros(size, dtype=torch.long)
        y[list(places)] = 1
        losses = (lambda logits, y: _of_positives(logits, y).mean()) if scalar else _of_positives
        clipper = ghostclip.GhostClipper(model := _WithLosses(nn.Linear(5, 3), losses), max_grad_norm=1.0)
        with pytest.raises((LossReductionError, SampleMixingError)), clipper:
            model(x, y).mean().backward()


@pytest.mark.parametrize("where", ["loop", "criterion", "model", "scalar of a model"])
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


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_rows_are_alike_where_they_are_equal(kind):
    """Not where one is another's numbers in other places, as labels of one number among zeros are."""
    labels = functional.one_hot(torch.tensor([2, 2, 0, 2, 2]), 3).to(kind)
    for rows, axis in ((labels, 0), (labels.T, 1)):
        (found,) = alike([(rows, axis)])
        assert (found.numbers, found.like_B.tolist(), found.all) == (3, [4, 4, 1, 4, 4], False)
        assert rare_sample([found]) == 2
    (found,) = alike([(labels[3:], 0)])
    assert found.all
    assert rare_sample([found]) == -1


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.complex64), torch.eye(3, device="meta")]
)
def test_nothing_is_said_of_rows_that_cannot_be_compared(tensor):
    assert alike([(tensor, 0), (torch.zeros(3, requires_grad=True), 0), (torch.zeros(3), None)]) == []
