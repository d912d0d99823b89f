"""The wrapped criterion: one loss per sample, whatever the criterion reduces over, and two passes behind backward()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import GhostClipError, LossReductionError
from ghostclip.facade import PrivateCriterion

B, T, C = 4, 3, 5


def clipper_of(model: nn.Module, reduction: str = "mean") -> ghostclip.GhostClipper:
    return ghostclip.GhostClipper(model, max_grad_norm=1e6, strategy="ghost", loss_reduction=reduction)


def private(criterion, reduction: str = "mean") -> PrivateCriterion:
    return PrivateCriterion(clipper_of(nn.Linear(1, 1), reduction), criterion)


def test_backward_gives_the_sum_of_sample_gradients_and_item_the_loss():
    model = nn.Linear(2, C)
    x, y = torch.randn(B, 2), torch.randint(0, C, (B,))
    plain = nn.functional.cross_entropy(model(x), y)
    expected = torch.autograd.grad(plain, model.weight)[0] * B
    criterion = PrivateCriterion(clipper_of(model), nn.CrossEntropyLoss())
    loss = criterion(model(x), y)
    assert loss.item() == pytest.approx(plain.item()) == float(loss)
    loss.backward()
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_arithmetic_scales_every_sample():
    criterion = private(nn.MSELoss())
    loss = criterion(torch.tensor([1.0, 3.0]), torch.zeros(2))
    assert ((loss / 2 + 1) * 4 - 3).per_sample.tolist() == [3.0, 19.0]
    assert (1 - loss).per_sample.tolist() == [0.0, -8.0]
    assert (loss + loss - 2 * loss).per_sample.tolist() == [0.0, 0.0]
    with pytest.raises(LossReductionError, match="Compute further terms in the criterion"):
        _ = loss + criterion(torch.zeros(3), torch.zeros(3))
    with pytest.raises(LossReductionError, match="Compute further terms in the criterion"):
        _ = loss * torch.tensor([1.0, 2.0])


def test_a_loss_is_shown_and_compared_as_its_value():
    loss = private(nn.MSELoss())(torch.tensor([1.0, 3.0]), torch.zeros(2))
    assert f"{loss:.3f}" == "5.000"
    assert f"{loss}" == str(loss)
    assert loss < 6
    assert torch.inf > loss > torch.tensor(4.0)
    assert min([loss / 2, loss]).item() == 2.5
    assert loss.mean() is loss
    assert loss.cpu() == loss.data == 5.0
    with pytest.raises(LossReductionError, match="loss_reduction='mean'"):
        private(nn.MSELoss(reduction="sum"), "sum")(torch.zeros(2), torch.zeros(2)).mean()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_positions_of_a_sample_are_reduced_as_the_criterion_would(reduction):
    output, target = torch.randn(B, T, 2), torch.randn(B, T, 2)
    loss = private(nn.MSELoss(reduction=reduction), reduction)(output, target)
    assert loss.per_sample.shape == (B,)
    torch.testing.assert_close(loss.detach(), nn.MSELoss(reduction=reduction)(output, target))


def test_column_of_losses_is_not_broadcast():
    loss = private(nn.MSELoss())(torch.randn(B, 1), torch.randn(B, 1))
    assert loss.per_sample.shape == (B,)


@pytest.mark.parametrize("flattened", [False, True])
def test_ignored_positions_do_not_count(flattened):
    logits, target = torch.randn(B, T, C), torch.randint(0, C, (B, T))
    target[0, 1:] = target[1, :] = -100
    criterion = private(nn.CrossEntropyLoss())
    if flattened:
        loss = criterion(logits.reshape(-1, C), target.reshape(-1), shape=logits.shape)
    else:
        loss = criterion(logits.transpose(1, 2), target)
    for b in range(B):
        kept = target[b] != -100
        expected = nn.functional.cross_entropy(logits[b][kept], target[b][kept]) if kept.any() else torch.tensor(0.0)
        torch.testing.assert_close(loss.per_sample[b], expected)


def test_own_reduction_is_put_back_also_after_an_error():
    criterion = nn.CrossEntropyLoss()
    wrapped = private(criterion)
    wrapped(torch.randn(B, C), torch.zeros(B, dtype=torch.long))
    with pytest.raises(ValueError, match="batch_size"):
        wrapped(torch.randn(B, C), torch.zeros(B + 1, dtype=torch.long))
    assert criterion.reduction == wrapped.reduction == "mean"


def test_function_that_returns_losses_per_sample_is_taken_as_it_is():
    loss = private(lambda output, target: (output - target).abs())(torch.ones(B), torch.zeros(B))
    assert loss.per_sample.tolist() == [1.0] * B


def test_reduced_loss_is_refused():
    with pytest.raises(LossReductionError, match="cross_entropy"):
        private(nn.functional.cross_entropy)(torch.randn(B, C), torch.zeros(B, dtype=torch.long))


def test_contradicting_reduction_is_refused():
    with pytest.raises(LossReductionError, match="'sum'"):
        private(nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.parametrize("mixes", [False, True])
def test_a_function_of_flattened_positions_is_looked_at_sample_by_sample(mixes):
    def losses(output, target):
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return each / target.bincount(minlength=C)[target] if mixes else each

    model, x, y = nn.Linear(2, C), torch.randn(B, T, 2), torch.randint(0, C, (B * T,))
    criterion = PrivateCriterion(clipper_of(model), losses)
    loss = criterion(model(x).flatten(0, 1), y, shape=(B, T))
    wanted = losses(model(x).flatten(0, 1), y).view(B, T).mean(1)
    torch.testing.assert_close(loss.per_sample, wanted)
    if mixes:
        with pytest.raises(GhostClipError, match="half of the samples were replaced"):
            loss.backward()
    else:
        loss.backward()
