"""Accountants that scripts put in the place of the engine's: with Opacus's four methods, or ghostclip's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.accounting import GaussianAccountant, IAccountant, RDPAccountant
from ghostclip.errors import BudgetExceededError, InvalidOptionError
from ghostclip.privacy.budget import Budget
from tests.private_run import PrivateRun


class Counting(IAccountant):
    """Says a tenth of ε for each step; keeps the steps in `history` without joining equal ones."""

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float) -> float:
        return len(self) / 10

    def __len__(self) -> int:
        return len(self.history)

    @classmethod
    def mechanism(cls) -> str:
        return "counting"


class Duck:
    """The four methods without the base class, as a script may have them."""

    steps = 0

    def step(self, *, noise_multiplier, sample_rate):
        self.steps += 1

    def get_epsilon(self, delta):
        return float(self.steps)

    def __len__(self):
        return self.steps

    def mechanism(self):
        return "duck"


class Training(PrivateRun):
    """A small private training whose loop is a call; another accountant may be put in before it is made."""

    def __init__(self, engine, *, budget=None, before=None):
        if before is not None:
            engine.accountant = before
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(40, 4))
        super().__init__(data, model=nn.Linear(4, 2), engine=engine, batch_size=8, budget=budget)

    def train(self, steps):
        for _, (x,) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            self.model(x).square().mean(1).mean().backward()
            self.optimizer.step()
        return self


@pytest.mark.parametrize("kind", [Counting, Duck])
@pytest.mark.parametrize("late", [False, True])
def test_four_methods_are_told_of_every_release(kind, late):
    own = kind()
    training = Training(PrivacyEngine(), before=None if late else own)
    training.train(2)
    if late:
        training.engine.accountant = own
    assert training.engine.accountant is own
    assert len(own) == 2
    training.train(3)
    assert len(own) == 5
    assert training.engine.get_epsilon(1e-3) == own.get_epsilon(1e-3)


def test_budget_bounds_and_summary_are_the_engines_own():
    training = Training(PrivacyEngine(), before=Duck()).train(2)
    plain = Training(PrivacyEngine()).train(2)
    assert training.engine.epsilon_bounds(1e-3) == plain.engine.epsilon_bounds(1e-3)
    assert training.engine.summary(1e-3) == plain.engine.summary(1e-3)
    with pytest.raises(BudgetExceededError):
        Training(PrivacyEngine(), before=Duck(), budget=Budget(0.5, 1e-3)).train(5)


def test_checkpoint_fills_an_accountant_with_four_methods(tmp_path):
    training = Training(PrivacyEngine(), before=Counting()).train(3)
    training.engine.save_checkpoint(path=tmp_path / "c", module=training.model, optimizer=training.optimizer)
    for before in (Counting(), Duck()):
        again = Training(PrivacyEngine(), before=before)
        again.engine.load_checkpoint(path=tmp_path / "c", module=again.model, optimizer=again.optimizer)
        assert len(again.engine.accountant) == 3
    back = training.train(1).engine
    back.load_checkpoint(path=tmp_path / "c", module=training.model, optimizer=training.optimizer)
    # The fourth step was released, whatever the model has gone back to.
    assert back.accountant.history == [(1.0, 0.2, 4)]


def test_what_is_refused(tmp_path):
    engine = PrivacyEngine()
    with pytest.raises(InvalidOptionError, match="has no step, get_epsilon"):
        engine.accountant = object()
    with pytest.raises(InvalidOptionError, match="central-limit"):
        engine.accountant = GaussianAccountant(estimate=True)
    full = Counting()
    full.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(InvalidOptionError, match="holds 1 steps"):
        engine.accountant = full
    brought = RDPAccountant()
    brought.step(noise_multiplier=2.0, sample_rate=0.1)
    with pytest.raises(InvalidOptionError, match="ledger does not hold"):
        PrivacyEngine(ledger=tmp_path / "ledger").accountant = brought


def test_releases_that_step_cannot_say_are_refused_before_they_happen():
    training = Training(PrivacyEngine())
    training.engine.accountant.add(("allocation", (1.0, 4.0), 1))
    with pytest.raises(InvalidOptionError, match="not releases of kind 'allocation'"):
        training.engine.accountant = Duck()
