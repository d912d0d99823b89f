"""Every way to sample, through the engine: budgets, ledgers and checkpoints account for what was released."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.accounting import create_accountant
from ghostclip.data import DPDataLoader, FullBatch, Poisson, Shuffled, UserPoisson
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import BudgetExceededError, DataError, InvalidOptionError
from ghostclip.privacy.budget import Budget
from tests.engine.training import parameters_of, small_data
from tests.private_run import DELTA, PrivateRun

RECORDS = 50
DATA = small_data(RECORDS)
USERS = [record // 2 for record in range(RECORDS)]
SCHEMES = {
    "poisson": lambda: Poisson(num_samples=RECORDS, sample_rate=0.2),
    "users": lambda: UserPoisson(USERS, sample_rate=0.2, max_records=2),
    "truncated": lambda: Poisson(num_samples=RECORDS, sample_rate=0.2, truncation=14),
    "full": lambda: FullBatch(num_samples=RECORDS),
    "shuffled": lambda: Shuffled(num_samples=RECORDS, batch_size=10),
}
PER_PASS = {"shuffled": 5}
"""Steps that one event covers."""


def costs(name, events, sigma=1.0):
    """The ledger of so many events, written down by hand: (history, others)."""
    if name == "truncated":
        return [], [("truncated_poisson", (sigma, 0.2, 50.0, 14.0), events)]
    rate = {"poisson": 0.2, "users": 0.2}.get(name, 1.0)
    return [(sigma / 2 if name == "users" else sigma, rate, events)], []


def epsilon_of(name, events):
    accountant = create_accountant("rdp")
    accountant.history, accountant.others = costs(name, events)
    return accountant.get_epsilon(DELTA)


class Run(PrivateRun):
    """A private training on one of the schemes."""

    def __init__(self, name, folder=None, *, physical=None, scheme=None, **options):
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3))
        scheme = SCHEMES[name]() if scheme is None else scheme
        loader = DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=10), scheme=scheme)
        ledger = None if folder is None else folder / "ledger"
        super().__init__(
            DATA, model=model, inner=torch.optim.Adam, lr=0.05, data_loader=loader, ledger=ledger, **options
        )
        self.physical = physical

    @property
    def account(self):
        """(history, others)."""
        return self.engine.accountant.history, self.engine.accountant.others

    def one_pass(self, last=math.inf, after=None):
        """One pass, or what is left of it up to so many releases."""
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=self.physical or RECORDS, optimizer=self.optimizer
        ) as batches:
            for inputs, targets in batches:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
                if self.optimizer.last_step_was_virtual:
                    continue
                if after is not None:
                    after(self.optimizer.releases)
                if self.optimizer.releases >= last:
                    return

    def train(self, steps, *, after=None):
        """Release so many steps, in as many passes as it takes."""
        last = self.optimizer.releases + steps
        while self.optimizer.releases < last:
            self.one_pass(last, after)

    def until_spent(self):
        """Train until a budget raises or ends the training."""
        while not self.engine.budget_spent:
            self.one_pass()


@pytest.mark.parametrize("name", SCHEMES)
def test_account_is_what_was_released(name):
    run = Run(name)
    run.train(7)
    assert run.account == costs(name, math.ceil(7 / PER_PASS.get(name, 1)))
    assert run.engine.get_epsilon(DELTA) == pytest.approx(epsilon_of(name, math.ceil(7 / PER_PASS.get(name, 1))))


@pytest.mark.parametrize("name", SCHEMES)
def test_budget_that_raises_lets_out_what_fits_and_no_more(name):
    run = Run(name, budget=Budget(epsilon_of(name, 3), DELTA))
    with pytest.raises(BudgetExceededError, match="3 steps are accounted"):
        run.until_spent()
    assert run.account == costs(name, 3)
    assert run.optimizer.releases == 3 * PER_PASS.get(name, 1)
    assert run.engine.get_epsilon(DELTA) <= epsilon_of(name, 3)


@pytest.mark.parametrize("name", SCHEMES)
def test_budget_that_stops_ends_the_training_across_a_resumption(name, tmp_path):
    run = Run(name, tmp_path, budget=Budget(epsilon_of(name, 4), DELTA, when_spent="stop"), physical=4)
    run.train(2)
    run.save(tmp_path / "run.pt")
    run.engine.close()
    resumed = Run(name, tmp_path, budget=Budget(epsilon_of(name, 4), DELTA, when_spent="stop"), physical=4)
    resumed.load(tmp_path / "run.pt")
    resumed.until_spent()
    assert resumed.account == costs(name, 4)
    assert resumed.optimizer.releases == 4 * PER_PASS.get(name, 1)


@pytest.mark.parametrize(("name", "with_ledger"), [(name, name in ("users", "shuffled")) for name in SCHEMES])
def test_resumed_run_is_the_uninterrupted_one_and_costs_the_same(name, with_ledger, tmp_path):
    folder = tmp_path if with_ledger else None
    run, saved = Run(name, folder), tmp_path / "run.pt"
    run.train(12, after=lambda done: run.save(saved) if done == 8 else None)
    run.engine.close()
    resumed = Run(name, folder)
    resumed.load(saved)
    resumed.train(4)
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert resumed.account == run.account == costs(name, math.ceil(12 / PER_PASS.get(name, 1)))


@pytest.mark.parametrize("name", SCHEMES)
def test_target_epsilon_is_met_and_kept(name):
    run = Run(name, epsilon=6.0, epochs=2, when_spent="raise")
    for _ in range(2):
        run.one_pass()
    assert 5.9 < run.engine.get_epsilon(DELTA) <= 6.0
    with pytest.raises(BudgetExceededError):
        run.until_spent()
    assert run.engine.get_epsilon(DELTA) <= 6.0


@pytest.mark.parametrize("name", SCHEMES)
def test_several_backward_passes_are_charged_or_refused(name):
    run = Run(name)
    before = parameters_of(run.model)

    def two_passes():
        for inputs, targets in run.loader:
            for _ in range(2):
                nn.functional.cross_entropy(run.model(inputs), targets).backward()
            run.optimizer.step()
            return

    refusal = pytest.raises(InvalidOptionError, match="max_batch_size=14")
    with pytest.warns(UserWarning, match="2 backward passes"), refusal if name == "truncated" else nullcontext():
        two_passes()
    rate = {"poisson": 0.4, "users": 0.4}.get(name, 1.0)
    charged = [(0.25 if name == "users" else 0.5, rate, 1)]
    assert run.account == (([], []) if name == "truncated" else (charged, []))
    assert torch.equal(parameters_of(run.model), before) == (name == "truncated")


def test_fresh_randomness_in_the_middle_of_a_shuffled_pass_is_another_pass(tmp_path):
    """The rest of the new order holds records that the interrupted pass has shown already."""
    run = Run("shuffled")
    run.train(3)
    run.save(tmp_path / "run.pt")
    resumed = Run("shuffled")
    resumed.load(tmp_path / "run.pt", fresh_randomness=True)
    resumed.train(2)
    assert resumed.account == costs("shuffled", 2)


def test_less_noise_in_the_rest_of_a_shuffled_pass_is_charged_after_a_resumption(tmp_path):
    run = Run("shuffled")
    run.train(3)
    run.save(tmp_path / "run.pt")
    resumed = Run("shuffled")
    resumed.load(tmp_path / "run.pt")
    resumed.optimizer.noise_multiplier = 0.5
    resumed.train(2)
    assert resumed.engine.accountant.history == [(1.0, 1.0, 1), (0.5, 1.0, 1)]


def test_poisson_loader_without_poisson_sampling_is_refused():
    with pytest.raises(DataError, match="several batches"):
        Run("poisson", poisson_sampling=False)


def test_relation_of_the_sampler_is_that_of_the_account(tmp_path):
    truncated = Poisson(num_samples=RECORDS, sample_rate=0.2, truncation=14, relation="add_remove")
    run = Run("", tmp_path, scheme=truncated)
    run.train(3)
    run.save(tmp_path / "run.pt")
    assert run.engine.accountant.relation == "add_remove"
    assert run.account == costs("truncated", 3)
    assert run.engine.get_epsilon(DELTA) > epsilon_of("truncated", 3)
    assert "one record more or less" in run.engine.summary(DELTA)
    again = PrivacyEngine(ledger=tmp_path / "ledger", accountant="rdp")
    assert again.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)
    with pytest.raises(InvalidOptionError, match="'add_remove'"):
        Run("truncated", tmp_path)
    alone = PrivacyEngine(ledger=tmp_path / "ledger", accountant="rdp")
    alone.load_checkpoint(path=tmp_path / "run.pt", module=run.model)
    assert alone.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)


def test_what_the_user_records_beside_the_training_counts_in_budgets():
    """A noisy hyper-parameter search recorded by hand, after the budget had worked out how many steps fit."""
    run = Run("poisson", budget=Budget(epsilon_of("poisson", 40), DELTA))
    run.train(2)
    run.engine.accountant.step(noise_multiplier=4.0, sample_rate=1.0)
    with pytest.raises(BudgetExceededError):
        run.until_spent()
    assert run.engine.get_epsilon(DELTA) <= epsilon_of("poisson", 40)
    assert 2 < run.optimizer.releases < 40
