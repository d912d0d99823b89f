"""A load that fails, wherever it fails, leaves model, optimizer, account, noise, batches, generators as they were."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ghostclip import PrivacyEngine
from ghostclip.compat.opacus import schedulers
from ghostclip.errors import GhostClipError
from ghostclip.privacy import checkpoints
from ghostclip.privacy.account import Account
from ghostclip.privacy.budget import Budget
from ghostclip.privacy.checkpoints import digest_of
from ghostclip.privacy.ledger_file import LedgerFile
from tests.compat.test_own_accountant import Counting
from tests.engine.training import small_data
from tests.private_run import DELTA, PrivateRun

DATA = small_data(50)


class InjectedError(Exception):
    """Nothing else raises this."""


class Run(PrivateRun):
    """A private training with everything that is loaded: schedules, buffers, a budget, Adam, dropout."""

    def __init__(self, folder=None, *, width=7, own=False, parts=False, **options):
        torch.manual_seed(width)
        engine = PrivacyEngine(ledger=folder, accountant="rdp")
        if own:
            engine.accountant = Counting()
        model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))
        model.register_buffer("seen", torch.zeros(2))
        if parts:
            inner = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
            options["optimizer"] = [inner(part.parameters()) for part in (model[0], model[3])]
        budget = Budget(50.0, DELTA)
        super().__init__(DATA, model=model, engine=engine, inner=torch.optim.Adam, lr=0.05, budget=budget, **options)
        self.members = self.optimizer if parts else [self.optimizer]
        self.optimizer = self.optimizer[0].release if parts else self.optimizer
        self.schedules = {}
        if "clipping" not in options:
            self.schedules["noise_scheduler"] = schedulers.ExponentialNoise(self.optimizer, gamma=0.9)
            self.schedules["grad_clip_scheduler"] = schedulers.StepGradClip(self.optimizer, step_size=1, gamma=0.5)

    def train(self, steps):
        for _, batch in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            self.backward(batch)
            for optimizer in self.members:
                optimizer.step()
        for schedule in self.schedules.values():
            schedule.step()
        return self

    def save(self, place):
        return super().save(place, **self.schedules)

    def load(self, place):
        super().load(place, **self.schedules)

    def state(self):
        """Digests of everything that loading changes, by name."""
        inner, account = self.optimizer.original_optimizer, self.engine._account
        parts = {
            "module": dict(self.model.state_dict()),
            "which tensors": [id(p) for p in (*self.model.parameters(), *self.model.buffers())],
            "optimizer": inner.state_dict(),
            "account": [dict(account.accountant.state_dict()), account.runs, account.coordinates, account.charged],
            "released": [(*kind, number) for kind, number in account._released.items()],
            "accountant": [self.engine.accountant.history, len(self.engine.accountant), self.engine.get_epsilon(1e-5)],
            "budget": [str(vars(budget)) for budget in account.budgets],
            "noise": self.optimizer.noise_source.state_dict(),
            "batches": self.loader.state_dict(),
            "draws": [str(vars(self.loader.private_sampler.draws))],
            "sampling": self.engine._sampling.state_dict(),
            "values": [self.optimizer.releases, self.optimizer.noise_multiplier, self.optimizer.max_grad_norm],
            "schedules": [schedule.state_dict() for schedule in self.schedules.values()],
            "generator": [torch.get_rng_state()],
            "ledger": [account.ledger_position()],
        }
        return {name: digest_of({"": part}) for name, part in parts.items()}


def _inject(patch, owner, name, *, works=True):
    """Let something do its work and then raise: what it changed must be put back."""
    work = getattr(owner, name)

    def does_and_raises(*arguments, **options):
        if works:
            work(*arguments, **options)
        raise InjectedError(name)

    patch.setattr(owner, name, does_and_raises)


STAGES = {
    "module": lambda run: (run.model, "load_state_dict"),
    "optimizer": lambda run: (run.optimizer.original_optimizer, "load_state_dict"),
    "sampler": lambda run: (run.loader.private_sampler, "load_state_dict"),
    "sampling": lambda run: (run.engine._sampling, "load_state_dict"),
    "noise": lambda run: (run.optimizer.noise_source, "load_state_dict"),
    "policy": lambda run: (run.optimizer.clipper.policy, "load_state_dict"),
    "generator": lambda _: (checkpoints, "continue_generators"),
    "schedule of the noise": lambda run: (run.schedules["noise_scheduler"], "load_state_dict"),
    "schedule of the bound": lambda run: (run.schedules["grad_clip_scheduler"], "load_state_dict"),
    "account": lambda _: (Account, "load"),
    "accountant": lambda run: (run.engine.accountant, "load_state_dict"),
    "ledger": lambda _: (LedgerFile, "append"),
}
SETTINGS = {"policy": {"clipping": "adaptive"}, "accountant": {"own": True}}


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_that_fails_at_any_stage_changes_nothing(stage, tmp_path, monkeypatch):
    # A ledger's line is written only where an account from before it is taken over.
    with_ledger, options = stage == "ledger", SETTINGS.get(stage, {})
    saving = Run(**options)
    # An accountant without steps is told of them one by one: this one has some, of the same training.
    run = saving if stage == "accountant" else Run(tmp_path / "ledger" if with_ledger else None, **options)
    place = saving.train(4).save(tmp_path / "run.pt")
    before = run.state()
    with monkeypatch.context() as patch:
        owner, name = STAGES[stage](run)
        _inject(patch, owner, name, works=not with_ledger)
        with pytest.raises(InjectedError):
            run.load(place)
    assert run.state() == before


@pytest.mark.parametrize("stage", ["sampler", "sampling", "noise", "account"])
def test_optimizers_state_that_fails_at_any_stage_changes_nothing(stage, tmp_path, monkeypatch):
    state = Run().train(4).optimizer.state_dict()
    run = Run()
    before = run.state()
    with monkeypatch.context() as patch:
        owner, name = STAGES[stage](run)
        _inject(patch, owner, name)
        with pytest.raises(InjectedError):
            run.optimizer.load_state_dict(state)
    assert run.state() == before
    run.optimizer.load_state_dict(state)
    assert run.optimizer.releases == 4


@pytest.mark.parametrize("failing", ["inner", "one of several", "second of several"])
def test_torchs_part_that_fails_changes_nothing(failing, monkeypatch):
    several = failing != "inner"
    state = Run(parts=several).train(3).optimizer.state_dict()
    run = Run(parts=several)
    before = run.state()
    inner = run.optimizer.original_optimizer
    owner = {"inner": lambda: inner}.get(failing, lambda: inner.members[failing.startswith("second")])()
    with monkeypatch.context() as patch:
        _inject(patch, owner, "load_state_dict")
        with pytest.raises(InjectedError):
            run.optimizer.load_state_dict(state)
    assert run.state() == before


class Refusal:
    """What is wrong with what is loaded, in itself."""

    @staticmethod
    def other_widths(folder):
        return Run(width=9).train(2).save(folder / "run.pt")

    @staticmethod
    def other_noise(folder):
        return Run(sigma=2.0).train(2).save(folder / "run.pt")

    @staticmethod
    def cut(folder):
        place = Run().train(2).save(folder / "run.pt")
        place.write_bytes(place.read_bytes()[:-100])
        return place

    @staticmethod
    def without_an_optimizer(folder):
        run = Run().train(2)
        run.engine.save_checkpoint(path=folder / "run.pt", module=run.model, optimizer=None)
        return folder / "run.pt"

    @staticmethod
    def with_a_ledger(folder):
        return Run(folder / "ledger").train(2).save(folder / "run.pt")


@pytest.mark.parametrize("kind", ["other_widths", "other_noise", "cut", "without_an_optimizer", "with_a_ledger"])
def test_what_cannot_be_loaded_changes_nothing(kind, tmp_path):
    place = getattr(Refusal, kind)(tmp_path)
    run = Run()
    run.schedules = {} if kind == "other_noise" else run.schedules
    before = run.state()
    with pytest.raises((GhostClipError, RuntimeError)):
        run.load(place)
    assert run.state() == before


@pytest.mark.parametrize("wrong", ["key", "position", "remaining"])
@pytest.mark.parametrize("what", ["sampler", "noise"])
def test_positions_that_cannot_be_read_change_nothing(what, wrong):
    run = Run().train(2)
    holder = run.loader.private_sampler if what == "sampler" else run.optimizer.noise_source
    if wrong not in holder.state_dict():
        return
    other = {**holder.state_dict(), "key": "00" * 16, "position": 77, wrong: "?"}
    before = run.state()
    with pytest.raises((GhostClipError, TypeError, ValueError)):
        holder.load_state_dict(other)
    assert run.state() == before
