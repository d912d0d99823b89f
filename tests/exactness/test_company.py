"""Samples that follow others without a gradient between them: by number, by counting, by another branch."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import SampleMixingError


def _by_number(model, x):
    return model.layer(x) / len(x)


def _by_counting(model, x):
    """Rows of a kind beyond the third are dropped, whichever sample they belong to."""
    kept = ((x[:, 1] > 0).cumsum(0) <= 3).to(x.dtype)
    return model.layer(x) * kept.unsqueeze(-1)


def _by_branch(model, x):
    """A mask only where some sample is padded."""
    h = model.layer(x)
    return h * 0.5 if bool((x == 0).any()) else h


def _by_each_own(model, x):
    return model.layer(x) * (x.mean(1, keepdim=True) > 0)


class _Model(nn.Module):
    def __init__(self, way, *, dropout=0.0):
        super().__init__()
        self.layer, self.way, self.dropout = nn.Linear(3, 4), way, nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.way(self, x))


def _batch():
    x = torch.randn(5, 3)
    x[0, 0] = 0.0
    x[:, 1] = torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0])
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [_by_number, _by_counting, _by_branch])
def test_company_is_refused(way, dtype):
    model = _Model(way).to(dtype)
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
        model(_batch().to(dtype))


def test_own_rows_are_not():
    model = _Model(_by_each_own)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(model(_batch()).square().sum(1))
    assert clipper.batch_size == 5


def test_random_models_are_left_out():
    """Other masks are no evidence."""
    model = _Model(_by_each_own, dropout=0.5)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(model(_batch()).square().sum(1))


def test_proof_can_be_switched_off():
    model = _Model(_by_number)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1, probe=False)
    clipper.backward(model(_batch()).square().sum(1))


def test_generators_are_where_they_would_be():
    model, x = _Model(_by_each_own), _batch()
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    torch.manual_seed(3)
    model(x)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))
