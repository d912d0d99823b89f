"""The parity check: a page that says exact or why not, for every kind of batch, and a model left as it was."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip import PrivacyEngine, _torch
from ghostclip.errors import DataError, GhostClipError, InvalidOptionError, UnsupportedModelError
from tests.cases import by_name
from tests.engine.training import small_data


class _Net(nn.Module):
    def __init__(self, *, spare=False):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(7, 3)
        self.spare = nn.Linear(3, 3) if spare else None

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.first(x))))


class _Adapter(nn.Module):
    """A frozen layer with a low-rank one beside it whose second half starts at zero, and one that is not in use."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.other = nn.Linear(5, 2, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x) + 0 * self.other(x))


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch):
    """A step is timed for as long as it takes once, in place of the half second that makes a good median."""
    monkeypatch.setattr(sys.modules[ghostclip.check.__module__], "_SECONDS", 0.0)


def _batch(samples=4):
    return torch.randn(samples, 5), torch.arange(samples) % 3


LOSSES = {
    "criterion": nn.CrossEntropyLoss(),
    "functional": functional.cross_entropy,
    "per sample": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    "mean": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_sound_model_is_exact_on_one_page(name):
    found = ghostclip.check(_Net(), _batch(), LOSSES[name])
    assert found.ok
    assert found.precision == "float64"
    (result,) = found.report.results
    assert result.error < 1e-12
    assert 0.9 < result.sensitivity <= 1 + 1e-9
    assert found.gradients.trainable == 4
    assert found.private.seconds > 0
    assert found.private.peak > 0
    page = str(found)
    assert len(page.splitlines()) <= 15
    for word in ("can be trained privately", "one sample at a time in float64", "1.0000 C", "4 of 4", "times the time"):
        assert word in page
    found.raise_if_bad()


@pytest.mark.parametrize("batch", [lambda x, y: [x, y], lambda x, y: {"x": x, "y": y}, lambda x, y: (x, {"y": [y]})])
def test_batches_of_any_form(batch):
    def loss(model, given):
        x, y = _torch.tree_leaves(given)
        return functional.cross_entropy(model(x), y)

    assert ghostclip.check(_Net(), batch(*_batch()), loss).ok


@pytest.mark.parametrize("name", ["gpt2_tied"])
def test_models_with_their_own_loss(name):
    case = by_name(f"hf_{name}")
    model, batch = case.model(torch.float32), case.data(torch.float32)
    found = ghostclip.check(model, {"x": batch}, lambda model, batch: case.losses(model, batch["x"]))
    assert found.report.ok, str(found)


def test_own_loss_of_a_dict():
    class Own(_Net):
        def forward(self, x, labels=None):
            logits = super().forward(x)
            return {"logits": logits} | ({} if labels is None else {"loss": functional.cross_entropy(logits, labels)})

    x, y = _batch()
    assert ghostclip.check(Own(), {"x": x, "labels": y}).ok
    with pytest.raises(InvalidOptionError, match=r"returned no loss for a batch of x\. Add the labels"):
        ghostclip.check(Own(), {"x": x})


def test_parameters_without_a_gradient_are_named():
    found = ghostclip.check(_Net(spare=True), _batch(), nn.CrossEntropyLoss())
    assert found.report.ok
    assert not found.ok
    assert found.gradients.unused == ["spare.bias", "spare.weight"]
    assert "NO GRADIENT     not in use: spare.bias, spare.weight" in str(found)
    with pytest.raises(InvalidOptionError, match=r"spare\.weight"):
        found.raise_if_bad()


def test_an_adapter_that_starts_at_zero_is_told_from_one_that_never_moves():
    found = ghostclip.check(_Adapter(), _batch(), nn.CrossEntropyLoss())
    assert found.gradients.still == ["other.weight"]
    assert not found.gradients.unused


def test_problems_come_with_place_and_remedy():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    found = ghostclip.check(model, _batch(), nn.CrossEntropyLoss())
    assert not found.ok
    page = str(found)
    assert "CANNOT" in page
    assert "PROBLEM in 1 (BatchNorm1d)" in page
    assert "remedy  Replace it by GroupNorm" in page
    assert found.private is None
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        found.raise_if_bad()


def test_nothing_about_the_model_is_changed():
    model = nn.Sequential(_Net(), nn.Linear(3, 3))
    model[0].register_buffer("seen", torch.zeros(1))
    model[0].register_forward_pre_hook(lambda module, _: module.seen.add_(1) and None)
    model[1].eval()
    model[0].first.weight.grad = torch.ones(7, 5)
    before, hooks = copy.deepcopy(model.state_dict()), len(model[0]._forward_pre_hooks)
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    ghostclip.check(model, _batch_of_fixed(), nn.CrossEntropyLoss())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[0].first.weight.grad, torch.ones(7, 5))
    assert model[1].weight.grad is None
    assert len(model[0]._forward_pre_hooks) == hooks
    assert not any(module._forward_hooks for module in model.modules())


def _batch_of_fixed():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 5, generator=generator), torch.tensor([0, 1, 2, 0])


WRONG = {
    "no model": (lambda: ([1], _batch(), None), "expected a torch.nn.Module, got list"),
    "frozen": (lambda: (_Net().requires_grad_(False), _batch(), nn.CrossEntropyLoss()), "no trainable parameter"),
    "no loss": (lambda: (_Net(), _batch(), None), "loss=None: .* it is a tuple. Give the loss"),
    "not a loss": (lambda: (_Net(), _batch(), "mean"), "loss='mean'"),
    "no tensor": (lambda: (_Net(), _batch(), lambda model, batch: 0.5), r"returned a float\. Return a tensor"),
    "no pair": (lambda: (_Net(), {"x": torch.randn(2, 5)}, nn.CrossEntropyLoss()), "batch has to be a pair"),
    "one sample": (lambda: (_Net(), _batch(1), nn.CrossEntropyLoss()), "1 sample"),
    "nothing": (lambda: (_Net(), [], lambda model, batch: model.zero()), "no tensor with a batch axis"),
    "all the same": (lambda: (_Net(), (torch.ones(3, 5), torch.ones(3).long()), nn.CrossEntropyLoss()), "all the same"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_input_is_refused_by_name(name):
    make, text = WRONG[name]
    with pytest.raises((InvalidOptionError, DataError), match=text):
        ghostclip.check(*make())


def test_a_private_model_is_refused():
    model = _Net()
    private, *_ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(small_data(), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(GhostClipError, match="has a clipper already"):
        ghostclip.check(private, _batch(), nn.CrossEntropyLoss())
