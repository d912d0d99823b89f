"""Records that meet in one sample, because two inputs behind a loss have them in different orders: refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import DrawError, SampleMixingError

pytestmark = pytest.mark.filterwarnings("ignore::ghostclip.errors.FixedSeedWarning")
N = 40


class _Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x, other=None):
        return self.layer(x) if other is None else self.layer(x) - self.layer(other)


def _step(loss, *columns):
    generator = torch.Generator().manual_seed(7)
    model = _Pair()
    model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*columns), batch_size=10, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for batch in loader:
        optimizer.zero_grad()
        loss(model, *batch).mean().backward()
        optimizer.step()


def _texts():
    return torch.randn(N, 5, generator=torch.Generator().manual_seed(1))


CROSSED = {
    "two forwards": lambda model, x: model(x).square().sum(1) + model(x.flip(0)).square().sum(1),
    "rolled": lambda model, x: (model(x) - model(x.roll(1, 0))).square().sum(1),
    "two inputs": lambda model, x: model(x, x[torch.randperm(len(x))]).square().sum(1),
}
TOGETHER = {
    "the same twice": lambda model, x, _: model(x).square().sum(1) + model(x).square().sum(1),
    "two columns": lambda model, x, y: (model(x) - model(y)).square().sum(1),
    "two columns at once": lambda model, x, y: model(x, y).square().sum(1),
    "changed": lambda model, x, _: model(x).square().sum(1) + model(x * 0.9).square().sum(1),
}


@pytest.mark.parametrize("loss", CROSSED.values(), ids=CROSSED)
def test_inputs_in_different_orders_are_refused(loss):
    says = "of another record in a further input behind the same loss|in another order than a second input's"
    with pytest.raises((DrawError, SampleMixingError), match=says):
        _step(loss, _texts())


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("loss", TOGETHER.values(), ids=TOGETHER)
def test_records_in_one_order_are_not(loss, few):
    other = (_texts().flip(1) > 0).float() if few else _texts().flip(1) + 1
    _step(loss, _texts(), other)


def test_contents_that_several_records_have_say_nothing():
    texts = _texts()
    _step(TOGETHER["two columns at once"], texts, texts.roll(1, 0))
    _step(TOGETHER["two columns"], (texts > 0).float(), (texts.roll(1, 0) > 0).float())
