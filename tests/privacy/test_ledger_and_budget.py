"""The ledger on disk, and budgets that are never exceeded."""

from __future__ import annotations

import json
import zlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.accounting import create_accountant
from ghostclip.data.batch_memory_manager import BatchMemoryManager
from ghostclip.errors import BudgetError, BudgetExceededError, InvalidOptionError, ResumeError
from ghostclip.privacy.budget import Budget
from ghostclip.privacy.ledger_file import Entry, LedgerFile, total
from tests.engine.training import as_if_drawn, parameters_of, small_data, small_model

DATA = small_data(50)
DELTA = 1e-5


def _entry(number, sigma=1.0):
    return Entry("run", number, ((sigma, 0.1, 1),), f"print {number}")


def test_lines_survive_and_equal_steps_are_joined(tmp_path):
    (tmp_path / "sub").mkdir()
    first = LedgerFile(tmp_path / "sub" / "ledger")
    first.begin_segment({"noise_multiplier": 1.0, "clipping": {"rule": "flat"}})
    for number in range(3):
        first.append(_entry(number))
    first.close()
    second = LedgerFile(tmp_path / "sub" / "ledger")
    second.begin_segment({"noise_multiplier": 1.0, "clipping": {"rule": "flat"}})
    second.append(_entry(3, sigma=2.0))
    assert second.entries == [_entry(0), _entry(1), _entry(2), _entry(3, sigma=2.0)]
    assert total(second.entries) == [(1.0, 0.1, 3), (2.0, 0.1, 1)]
    assert second.find("run", 2) == "print 2"
    assert second.find("another run", 2) is None
    assert (tmp_path / "sub" / "ledger").read_text().count("mechanism") == 1


@pytest.mark.parametrize("cut", range(2, 40, 7))
def test_torn_last_line_was_never_released_and_is_cut_off(cut, tmp_path):
    ledger = LedgerFile(tmp_path / "ledger")
    ledger.append(_entry(0))
    whole = (tmp_path / "ledger").read_bytes()
    ledger.append(_entry(1))
    ledger.close()
    torn = (tmp_path / "ledger").read_bytes()[:-cut]
    (tmp_path / "ledger").write_bytes(torn)
    again = LedgerFile(tmp_path / "ledger")
    assert again.entries == [_entry(0)]
    assert (tmp_path / "ledger").read_bytes() == torn
    again.append(_entry(1))
    assert (tmp_path / "ledger").read_bytes().startswith(whole)
    assert LedgerFile(tmp_path / "ledger").entries == [_entry(0), _entry(1)]


def test_damage_and_newer_versions_are_refused(tmp_path):
    ledger = LedgerFile(tmp_path / "ledger")
    ledger.begin_segment({"a": 1})
    ledger.append(_entry(0))
    content = (tmp_path / "ledger").read_bytes()
    (tmp_path / "ledger").write_bytes(content.replace(b"print", b"prinz"))
    with pytest.raises(ResumeError, match="line 4: the ledger is damaged"):
        LedgerFile(tmp_path / "ledger")
    body = json.dumps({"version": 99, "mechanism": {}}).encode()
    (tmp_path / "ledger").write_bytes(body + b"\t" + f"{zlib.crc32(body):08x}".encode() + b"\n")
    with pytest.raises(ResumeError, match="newer"):
        LedgerFile(tmp_path / "ledger")


def test_write_that_fails_leaves_no_half_line(tmp_path, monkeypatch):
    ledger = LedgerFile(tmp_path / "ledger")
    ledger.append(_entry(0))
    with monkeypatch.context() as patch:
        patch.setattr("ghostclip.privacy.ledger_file._to_disk", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            ledger.append(_entry(1))
    ledger.append(_entry(2))
    assert LedgerFile(tmp_path / "ledger").entries == ledger.entries == [_entry(0), _entry(2)]


class Run:
    """A private training."""

    def __init__(self, *, budget=None, ledger=None, epsilon=None, when_spent="raise", **options):
        self.engine, model = PrivacyEngine(ledger=ledger), small_model()
        arguments = {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data_loader": DataLoader(DATA, batch_size=10),
            "max_grad_norm": 1.0,
            **options,
        }
        if epsilon is None:
            private = self.engine.make_private(noise_multiplier=1.0, budget=budget, **arguments)
        else:
            private = self.engine.make_private_with_epsilon(
                target_epsilon=epsilon, target_delta=DELTA, epochs=2, when_spent=when_spent, **arguments
            )
        self.model, self.optimizer, self.loader = private
        self.batches = 0

    def epoch(self, loader=None):
        for inputs, targets in self.loader if loader is None else loader:
            self.batches += 1
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()

    def epochs(self, number):
        """Train until the data was passed so often, or something is raised."""
        for _ in range(number):
            self.epoch()

    def lower_and_lower(self):
        """Train with less noise in every epoch."""
        for _ in range(20):
            self.epoch()
            self.optimizer.noise_multiplier *= 0.8

    def epsilon(self):
        return self.engine.get_epsilon(DELTA)


def _epsilon_of(steps):
    accountant = create_accountant()
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
    run = Run(budget=Budget(4.6, DELTA, when_spent="stop"), poisson_sampling=False)
    for _ in range(5):
        run.epoch()
    assert run.engine.budget_spent
    assert run.epsilon() <= 4.6
    assert run.batches < 25


def test_how_many_steps_fit_is_worked_out_once(monkeypatch):
    budget, asked = Budget(_epsilon_of(40), DELTA), []
    within = Budget._within
    monkeypatch.setattr(Budget, "_within", lambda self, *given: asked.append(1) or within(self, *given))
    run = Run(budget=budget)
    run.epoch()
    first = len(asked)
    for _ in range(5):
        run.epoch()
    assert len(asked) == first <= 16


def test_target_epsilon_is_a_budget():
    run = Run(epsilon=3.0)
    for _ in range(2):
        run.epoch()
    assert len(run.engine.accountant) == 10
    with pytest.raises(BudgetExceededError):
        run.epochs(20)
    assert 2.9 < run.epsilon() <= 3.0


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
    assert run.epsilon() > 1.0


def test_schedule_that_lowers_the_noise_is_stopped_in_time():
    run = Run(budget=Budget(_epsilon_of(12), DELTA))
    with pytest.raises(BudgetExceededError):
        run.lower_and_lower()
    assert run.epsilon() <= _epsilon_of(12)


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
