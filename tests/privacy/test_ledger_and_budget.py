"""Budgets that are never exceeded, beside what the ledger on disk holds."""

from __future__ import annotations

import pytest
import torch

from ghostclip.accounting import create_accountant
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import BudgetError, BudgetExceededError, InvalidOptionError
from ghostclip.privacy.budget import Budget
from ghostclip.privacy.ledger_file import LedgerFile
from tests.engine.training import as_if_drawn, parameters_of, small_data
from tests.private_run import DELTA, PrivateRun

DATA = small_data(50)


class Run(PrivateRun):
    """A training whose batches are counted."""

    batches = 0

    def __init__(self, **options):
        super().__init__(DATA, **{"when_spent": "raise", "epochs": 2, **options} if "epsilon" in options else options)

    def epoch(self, loader=None):
        for batch in self.loader if loader is None else loader:
            self.batches += 1
            self.step(batch)

    def epochs(self, number):
        """Train until the data was passed so often, or something is raised."""
        for _ in range(number):
            self.epoch()

    def lower_and_lower(self):
        """Train with less noise in every epoch."""
        for _ in range(20):
            self.epoch()
            self.optimizer.noise_multiplier *= 0.8


def _epsilon_of(steps):
    accountant = create_accountant("rdp")
    accountant.history = [(1.0, 0.2, steps)]
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("steps", [1, 7, 8])
def test_step_that_does_not_fit_raises_and_releases_nothing(steps):
    run = Run(budget=Budget(_epsilon_of(steps), DELTA))
    with pytest.raises(BudgetExceededError, match=f"{steps} steps are accounted"):
        run.epochs(4)
    before = parameters_of(run.model)
    assert run.engine.accountant.history == [(1.0, 0.2, steps)]
    assert run.batches == steps + 1
    with pytest.raises(BudgetError):
        run.epoch()
    assert torch.equal(parameters_of(run.model), before)
    assert not run.engine.budget_spent


@pytest.mark.parametrize("physical", [None, 3])
def test_stopping_budget_ends_the_loops(physical):
    run = Run(budget=Budget(_epsilon_of(7), DELTA, when_spent="stop"))
    for _ in range(4):
        if physical is None:
            run.epoch()
            continue
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=physical, optimizer=run.optimizer
        ) as loader:
            run.epoch(loader)
    assert run.engine.budget_spent
    assert run.engine.accountant.history == [(1.0, 0.2, 7)]
    assert physical or run.batches == 8
    before, batches = parameters_of(run.model), run.batches
    run.epoch()
    assert run.batches == batches
    assert torch.equal(parameters_of(run.model), before)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_stopping_budget_ends_shuffled_passes_too():
    run = Run(budget=Budget(5.5, DELTA, when_spent="stop"), poisson_sampling=False)
    for _ in range(5):
        run.epoch()
    assert run.engine.budget_spent
    assert run.epsilon <= 5.5
    assert run.batches < 25


def test_target_epsilon_is_a_budget():
    run = Run(epsilon=3.0)
    for _ in range(2):
        run.epoch()
    assert len(run.engine.accountant) == 10
    with pytest.raises(BudgetExceededError):
        run.epochs(20)
    assert 2.9 < run.epsilon <= 3.0


def test_second_target_counts_from_there_on():
    run = Run(epsilon=3.0)
    run.epoch()
    with pytest.warns(UserWarning, match="accounted for already"):
        _, optimizer, _ = run.engine.make_private_with_epsilon(
            module=run.model,
            optimizer=run.optimizer,
            data_loader=run.loader,
            target_epsilon=1.0,
            target_delta=DELTA,
            epochs=2,
            max_grad_norm=1.0,
        )
    for _ in range(10):
        as_if_drawn(optimizer, 0)
        optimizer.step()
    assert run.epsilon > 1.0


def test_schedule_that_lowers_the_noise_is_stopped_in_time():
    run = Run(budget=Budget(_epsilon_of(12), DELTA))
    with pytest.raises(BudgetExceededError):
        run.lower_and_lower()
    assert run.epsilon <= _epsilon_of(12)


@pytest.mark.parametrize("given", [(0.0, DELTA), (1.0, 0.0), (1.0, 1.0), (float("inf"), DELTA), (1.0, DELTA, "later")])
def test_budgets_out_of_range_are_refused(given):
    with pytest.raises(InvalidOptionError):
        Budget(*given[:2], when_spent=given[2] if len(given) > 2 else "raise")


def test_new_process_starts_with_what_the_ledger_holds(tmp_path):
    run = Run(ledger=tmp_path / "ledger")
    run.epoch()
    run.engine.close()
    again = Run(ledger=tmp_path / "ledger", budget=Budget(_epsilon_of(7), DELTA))
    assert again.engine.accountant.history == [(1.0, 0.2, 5)]
    with pytest.raises(BudgetExceededError) as refused:
        again.epoch()
    entries = LedgerFile(tmp_path / "ledger").entries
    assert len(entries) == 7
    # Whoever meets it with the steps of an earlier run finds them.
    first, second = dict.fromkeys(entry.run[:8] for entry in entries)
    assert f"(ledger {tmp_path / 'ledger'}: 5 of run {first}, 2 of run {second})" in str(refused.value)
