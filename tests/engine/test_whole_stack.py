"""The whole stack as a user puts it together: a budget, a ledger, secure noise, an adaptive bound, physical batches."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.privacy.ledger_file import LedgerFile
from tests.engine.training import parameters_of, small_data

DATA = small_data(120)
TARGET, DELTA, EPOCHS = 4.0, 1e-5, 2
SAVED_AT = 7


class Script:
    """What a user's training script does."""

    def __init__(self, folder):
        self.engine = PrivacyEngine(secure_mode=True, ledger=folder / "ledger")
        net = nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 3))
        self.model, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
            module=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
            data_loader=DataLoader(DATA, batch_size=12, shuffle=True),
            target_epsilon=TARGET,
            target_delta=DELTA,
            epochs=EPOCHS,
            max_grad_norm=1.0,
            clipping="adaptive",
            when_spent="stop",
        )
        self.spent = []

    def train(self, place=None, *, ledger_then=None):
        """Train until the budget ends it; leave a checkpoint, and a copy of the ledger, in the middle of a pass."""
        while not self.engine.budget_spent:
            with BatchMemoryManager(
                data_loader=self.loader, max_physical_batch_size=4, optimizer=self.optimizer
            ) as batches:
                for inputs, targets in batches:
                    self.optimizer.zero_grad()
                    nn.functional.cross_entropy(self.model(inputs), targets).backward()
                    self.optimizer.step()
                    if self.optimizer.last_step_was_virtual:
                        continue
                    if self.engine.budget_spent or self.optimizer.releases % 8 == 0:
                        self.spent.append(self.engine.get_epsilon(DELTA))
                    if place is not None and self.optimizer.releases == SAVED_AT:
                        self.engine.save_checkpoint(path=place, module=self.model, optimizer=self.optimizer)
                        shutil.copy(self.engine._account.ledger.path, ledger_then)


@pytest.mark.parametrize("ledger", ["as it was when saved", "as the interrupted run left it"])
def test_budget_is_kept_and_the_resumed_run_is_the_uninterrupted_one(ledger, tmp_path):
    whole = Script(tmp_path)
    whole.train(tmp_path / "run.pt", ledger_then=tmp_path / "ledger then")
    assert max(whole.spent) <= TARGET
    assert TARGET - 0.01 < whole.engine.get_epsilon(DELTA) <= TARGET
    assert len(whole.engine.accountant) == whole.optimizer.releases >= EPOCHS * len(whole.loader)
    assert whole.optimizer.max_grad_norm != 1.0
    whole.engine.close()
    if ledger == "as it was when saved":
        shutil.copy(tmp_path / "ledger then", tmp_path / "ledger")
    torch.rand(17)
    resumed = Script(tmp_path)
    resumed.engine.load_checkpoint(path=tmp_path / "run.pt", module=resumed.model, optimizer=resumed.optimizer)
    resumed.train()
    assert max(resumed.spent) <= TARGET
    assert torch.equal(parameters_of(resumed.model), parameters_of(whole.model))
    assert resumed.optimizer.max_grad_norm == whole.optimizer.max_grad_norm
    assert resumed.engine.accountant.history == whole.engine.accountant.history
    assert resumed.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)
    assert len(LedgerFile(tmp_path / "ledger").entries) == whole.optimizer.releases == resumed.optimizer.releases
    assert f"{TARGET - 0.01:.2f}" <= resumed.engine.summary(DELTA).split("ε ≤ ")[1][:4] <= f"{TARGET:.2f}"
