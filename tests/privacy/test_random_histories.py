"""Whatever is saved, loaded, gone back to and started anew: an account holds every release that it should know of.

What it should know of: with a ledger all that was ever written to it; without one what this process has released, and
what the loaded states held.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch

from ghostclip import PrivacyEngine
from ghostclip.distributed.release import fingerprint
from ghostclip.errors import ResumeError
from ghostclip.privacy.ledger_file import LedgerFile
from tests.engine.training import small_data
from tests.private_run import PrivateRun

DATA = small_data(50)


class History:
    """A random walk through trainings of one model, by one or several processes in turn."""

    def __init__(self, folder, seed):
        self.folder, self.chance = folder, random.Random(seed)
        self.ledger = folder / "ledger" if self.chance.random() < 0.5 else None
        self.written, self.known = set(), set()
        self.checkpoints, self.states, self.accounts = [], [], []
        self.refused = 0
        self.log = []
        self.engine = None
        self.new_process()

    def new_process(self):
        if self.engine is not None:
            self.engine.close()
        self.engine = PrivacyEngine(ledger=self.ledger)
        self.known = set()
        # States of accountants have no origin: those of another process are not this one's to load.
        self.accounts = []
        self.make_private()

    def make_private(self):
        self.run = PrivateRun(DATA, engine=self.engine, inner=partial(torch.optim.SGD, momentum=0.5))
        self.model, self.optimizer = self.run.model, self.run.optimizer
        self.optimizer.attach_release_hook(self._released)

    def _released(self, _, released):
        self.known.add(fingerprint(released))
        if self.ledger is not None:
            self.written.add(fingerprint(released))

    def train(self):
        for number, batch in enumerate(self.run.loader):
            self.run.step(batch)
            if number == self.chance.randrange(3):
                return

    def save(self):
        place = self.folder / f"{len(self.checkpoints)}.pt"
        self.checkpoints.append((self.run.save(place), set(self.known)))

    def keep_state(self):
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        self.states.append((model, optimizer, set(self.known)))

    def keep_account(self):
        self.accounts.append((self.engine.accountant.state_dict(), set(self.known)))

    def load(self):
        place, known = self.chance.choice(self.checkpoints)
        fresh = self.chance.random() < 0.3
        self.run.load(place, fresh_randomness=fresh)
        self.known |= known

    def load_state(self):
        # Without its model the steps that are made again would come out otherwise, under the same noise.
        model, optimizer, known = self.chance.choice(self.states)
        self.optimizer.load_state_dict(optimizer)
        self.model.load_state_dict(model)
        self.known |= known

    def load_account(self):
        state, known = self.chance.choice(self.accounts)
        self.engine.accountant.load_state_dict(state)
        self.known |= known

    def walk(self, length):
        always = (self.train, self.train, self.save, self.keep_state, self.keep_account, self.new_process)
        for _ in range(length):
            possible = [*always, self.make_private]
            possible += [self.load] * 2 * bool(self.checkpoints)
            possible += [self.load_state] * bool(self.states) + [self.load_account] * bool(self.accounts)
            act = self.chance.choice(possible)
            self.log.append(act.__name__)
            try:
                act()
            except ResumeError as error:
                self.log.append(str(error)[:40])
                self.refused += 1
            truth = self.known if self.ledger is None else self.known | self.written
            assert len(self.engine.accountant) >= len(truth), self.log
            if self.ledger is not None:
                assert len(LedgerFile(self.ledger).entries) >= len(self.written), self.log
        return self


@pytest.mark.parametrize("seed", range(12))
def test_no_history_lowers_an_account(seed, tmp_path):
    History(tmp_path, seed).walk(14)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_no_long_history_lowers_an_account(seed, tmp_path):
    History(tmp_path, seed).walk(40)
