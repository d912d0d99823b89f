"""A model that another engine has trained: the new engine says so, and its summary adds both up."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from tests.private_run import DELTA, PrivateRun


def _model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Run(PrivateRun):
    def backward(self, batch):
        self.model(batch[0]).square().sum(1).mean().backward()


def _train(model, engine=None, *, steps=3):
    engine = engine or PrivacyEngine()
    return engine, Run(TensorDataset(torch.randn(40, 3)), model=model, engine=engine, batch_size=4).train(steps).model


TRAINED = {
    "the same model": lambda private, model: model,
    "the private model": lambda private, model: private,
    "unwrapped": lambda private, model: private.to_standard_module(),
    "a copy": lambda private, model: copy.deepcopy(model),
    "a copy of the private model": lambda private, model: copy.deepcopy(private),
    "a part": lambda private, model: nn.Sequential(model[0], nn.ReLU(), nn.Linear(4, 3)),
    "a frozen base": lambda private, model: nn.Sequential(model.requires_grad_(requires_grad=False), nn.Linear(2, 2)),
}


@pytest.mark.parametrize("way", TRAINED)
def test_a_new_engine_says_what_the_earlier_one_has_released(way):
    model = _model()
    first, private = _train(model)
    if way in ("the same model", "a part", "a frozen base"):
        private.remove_hooks()
    spent = first.get_epsilon(DELTA)
    with pytest.warns(UserWarning, match=r"trained by another PrivacyEngine before \(ε ≤ [\d.]+ in 3 releases") as told:
        second, _ = _train(TRAINED[way](private, model), steps=0)
    said = float(re.search(r"ε ≤ ([\d.]+) in", str(told[0].message)).group(1))
    assert spent <= said < spent + 1e-3
    assert second.get_epsilon(DELTA) == 0
    assert f"another engine trained this model, with ε ≤ {said:.4f} in 3 releases" in second.summary(DELTA)


def test_the_summary_adds_up_what_both_have_released():
    model = _model()
    first, private = _train(model)
    with pytest.warns(UserWarning, match="trained by another"):
        second, _ = _train(private, steps=4)
    alone, _ = _train(_model(), steps=7)
    said = float(re.search(r"ε ≤ ([\d.]+) together", second.summary(DELTA)).group(1))
    assert alone.get_epsilon(DELTA) <= said < alone.get_epsilon(DELTA) + 1e-3
    assert second.get_epsilon(DELTA) < said
    assert "together" not in first.summary(DELTA)


@pytest.mark.filterwarnings("ignore:this engine has accounted for another data set object")
def test_nothing_is_said_where_the_account_goes_on():
    model = _model()
    first, private = _train(model)
    _, private = _train(private, first)
    # What the message names.
    other = PrivacyEngine()
    other.accountant = first.accountant
    _train(private, other)
    assert len(other.accountant) == 9
    assert "another engine" not in other.summary(DELTA)
