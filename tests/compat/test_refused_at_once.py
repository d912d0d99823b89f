"""What scripts for Opacus catch: refusals come before the first forward, in the classes that Opacus raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip.errors import (
    IllegalModuleConfigurationError,
    UncoveredParameterError,
    UnsupportedModelError,
    UnsupportedModuleError,
)
from ghostclip.validation.fixers import ModuleValidator, register_module_validator
from tests.private_run import PrivateRun


def make_private(module: nn.Module, *, of: nn.Module | None = None):
    """Make a training private; its optimizer may be of another model."""
    optimizer = torch.optim.SGD((of or module).parameters(), lr=0.1)
    return PrivateRun(TensorDataset(torch.randn(8, 3, 4)), model=module, batch_size=2, optimizer=optimizer)


MIXING = {
    "batch norm": nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)),
    "frozen batch norm": nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8).requires_grad_(requires_grad=False)),
    "running statistics": nn.Sequential(nn.Conv1d(3, 8, 1), nn.InstanceNorm1d(8, track_running_stats=True)),
    "counts over the batch": nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)),
    "renormalised rows": nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)),
    "renormalised rows of bags": nn.Sequential(nn.EmbeddingBag(5, 3, max_norm=1.0)),
    "frozen table": nn.Sequential(
        nn.Embedding(5, 3, max_norm=1.0).requires_grad_(requires_grad=False), nn.Linear(3, 2)
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_modules_that_mix_samples_are_refused_before_the_first_forward(name):
    with pytest.raises(UnsupportedModuleError, match=r"ModuleValidator\.fix") as refused:
        make_private(MIXING[name])
    assert isinstance(refused.value, UnsupportedModelError)
    assert isinstance(refused.value, ValueError)


def test_validators_of_ones_own_are_asked(monkeypatch):
    class Odd(nn.Linear):
        pass

    monkeypatch.setattr(ModuleValidator, "VALIDATORS", dict(ModuleValidator.VALIDATORS))

    @register_module_validator(Odd)
    def validate(module):
        return [IllegalModuleConfigurationError(f"{module.in_features} is odd")]

    with pytest.raises(UnsupportedModuleError, match=r"0 \(Odd\): 3 is odd"):
        make_private(nn.Sequential(Odd(3, 2)))


def test_optimizer_of_another_model():
    # Begins with Opacus's words, by which people find it.
    said = r"^Module parameters are different than optimizer Parameters: 2 of .* from module\.parameters\(\)"
    with pytest.raises(ValueError, match=said) as refused:
        make_private(nn.Linear(4, 2), of=nn.Linear(4, 2))
    assert isinstance(refused.value, UncoveredParameterError)
