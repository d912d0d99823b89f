"""Going back in a process, however it is done, never lowers the account of what the process has released."""

from __future__ import annotations

import pytest
import torch

from ghostclip import PrivacyEngine
from ghostclip.accounting import RDPAccountant
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.privacy.ledger_file import LedgerFile
from tests.engine.training import parameters_of, small_data
from tests.private_run import DELTA, PrivateRun

DATA = small_data(50)


class Run(PrivateRun):
    """A training with Adam, whose position in noise can be read."""

    def __init__(self, ledger=None, **options):
        super().__init__(DATA, ledger=ledger, inner=torch.optim.Adam, lr=0.05, **options)

    def load(self, place, **options):
        super().load(place, **options)
        return self

    @property
    def steps(self):
        return len(self.engine.accountant)

    @property
    def noise(self):
        state = self.optimizer.noise_source.state_dict()
        return state["key"], state["position"]


# Checkpoints


def test_an_earlier_checkpoint_restores_the_model_and_not_the_account(tmp_path):
    run = Run().train(2)
    place, then = run.save(tmp_path / "run.pt"), parameters_of(run.model)
    run.train(3)
    spent, key, batches = run.engine.get_epsilon(DELTA), run.noise[0], run.loader.state_dict()["position"]
    run.load(place)
    assert torch.equal(parameters_of(run.model), then)
    assert run.engine.get_epsilon(DELTA) == spent
    # The same noise on other sums, here or where the checkpoint is continued, would tell their difference.
    assert run.noise[0] != key
    assert run.loader.state_dict()["position"] == batches
    assert run.optimizer.releases == 5
    run.train(2)
    assert run.engine.accountant.history == [(1.0, 0.2, 7)]
    run.load(run.save(tmp_path / "later.pt")).load(place)
    assert run.steps == 7


def test_an_optimizers_earlier_state_gets_noise_of_its_own():
    run = Run().train(2)
    state = run.optimizer.state_dict()
    key = run.noise[0]
    run.optimizer.load_state_dict(state)
    assert run.noise[0] == key
    run.train(1)
    run.optimizer.load_state_dict(state)
    assert run.noise[0] != key
    assert run.steps == 3


def test_with_a_ledger_the_steps_that_are_made_again_are_known(tmp_path):
    run = Run(tmp_path / "ledger").train(2)
    place = run.save(tmp_path / "run.pt")
    run.train(3)
    after = parameters_of(run.model)
    run.load(place)
    assert run.steps == 5
    assert run.optimizer.releases == 2
    run.train(3)
    assert torch.equal(parameters_of(run.model), after)
    assert run.steps == len(LedgerFile(tmp_path / "ledger").entries) == 5
    with pytest.raises(ResumeError, match="Make the training private anew"):
        run.load(place, fresh_randomness=True)
    anew = Run(engine=run.engine).load(place, fresh_randomness=True).train(1)
    assert anew.steps == len(LedgerFile(tmp_path / "ledger").entries) == 6


def test_a_checkpoint_of_another_training_is_refused_after_a_release(tmp_path):
    place = Run().train(4).save(tmp_path / "run.pt")
    run = Run().train(1)
    with pytest.raises(ResumeError, match="state of another training"):
        run.load(place)
    assert run.steps == 1


def test_a_later_checkpoint_of_the_same_training_is_gone_on_from(tmp_path):
    run = Run().train(1)
    early = run.save(tmp_path / "early.pt")
    late = run.train(3).save(tmp_path / "late.pt")
    branch = Run().load(early, fresh_randomness=True).train(1).save(tmp_path / "branch.pt")
    assert Run().load(early).train(1).load(late).steps == 4
    with pytest.raises(ResumeError, match="state of another training"):
        # Each has released something that the other does not hold.
        Run().load(early).train(2).load(branch)


def test_a_second_training_of_the_engine_counts_beside_the_first(tmp_path):
    first = Run().train(2)
    place = first.save(tmp_path / "run.pt")
    second = Run(sigma=2.0, engine=first.engine).train(3)
    first.load(place)
    assert first.engine.accountant.history == [(1.0, 0.2, 2), (2.0, 0.2, 3)]
    # The second optimizer has its own noise; that of the first must not come back in it.
    own = second.noise
    second.load(place, allow_mechanism_change=True)
    assert second.noise[0] not in (own[0], first.noise[0])
    assert second.steps == 5


@pytest.mark.parametrize("with_ledger", [False, True])
@pytest.mark.parametrize("part", ["noise", "batches"])
def test_a_part_that_goes_back_by_itself_repeats_nothing(part, with_ledger, tmp_path):
    """The difference of two sums under one noise has none, and two releases of one draw cost more than of two draws."""
    run = Run(tmp_path / "ledger" if with_ledger else None)
    holder = run.optimizer.noise_source if part == "noise" else run.loader
    earlier, later = holder.state_dict(), run.train(3) and holder.state_dict()
    holder.load_state_dict(earlier)
    with pytest.raises(ResumeError, match="repeat noise, or a draw"):
        run.train(1)
    holder.load_state_dict(later)
    assert run.train(1).steps == 4
    holder.load_state_dict(earlier)
    anew = Run(engine=run.engine, model=run.model).train(2)
    assert anew.steps == 6


# States of accountants


@pytest.mark.parametrize("accountant", ["best", "rdp"])
def test_an_accountants_earlier_state_leaves_counted_what_was_released(accountant):
    engine = PrivacyEngine(accountant=accountant)
    run = Run(engine=engine).train(2)
    early = engine.accountant.state_dict()
    run.train(3)
    spent = engine.get_epsilon(DELTA)
    engine.accountant.load_state_dict(early)
    assert engine.accountant.history == [(1.0, 0.2, 5)]
    assert engine.get_epsilon(DELTA) == spent
    engine.accountant.load_state_dict({"history": [(3.0, 0.1, 7)], "mechanism": accountant})
    assert run.steps == 12
    run.train(1)
    assert run.steps == 13


CHANGES = {
    "emptied": lambda accountant: accountant.history.clear(),
    "assigned": lambda accountant: setattr(accountant, "history", []),
    "shorter": lambda accountant: setattr(accountant, "history", [(1.0, 0.2, 4)]),
    "more noise": lambda accountant: setattr(accountant, "history", [(2.0, 0.2, 5)]),
    "smaller batches": lambda accountant: setattr(accountant, "history", [(1.0, 0.1, 5)]),
    "popped": lambda accountant: accountant.history.pop(),
}
ASKED = {
    "engine": lambda run, _: run.engine.get_epsilon(DELTA),
    "bounds": lambda run, _: run.engine.epsilon_bounds(DELTA),
    "summary": lambda run, _: run.engine.summary(DELTA),
    "accountant": lambda run, _: run.engine.accountant.get_epsilon(DELTA),
    "step": lambda run, _: run.train(1),
    "checkpoint": lambda run, folder: run.save(folder / "run.pt"),
    "state": lambda run, _: run.optimizer.state_dict(),
    "another accountant": lambda run, _: _replaced(run),
}


def _replaced(run):
    run.engine.accountant = RDPAccountant()
    return run.engine.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("change", "asked"), [*((change, "engine") for change in CHANGES), *(("emptied", asked) for asked in ASKED)]
)
def test_a_history_that_was_changed_by_hand_is_refused(change, asked, tmp_path):
    run = Run().train(5)
    before = parameters_of(run.model)
    history = list(run.engine.accountant.history)
    CHANGES[change](run.engine.accountant)
    with pytest.raises(InvalidOptionError, match=r"lacks \d releases.*Put them back"):
        ASKED[asked](run, tmp_path)
    assert torch.equal(parameters_of(run.model), before)
    assert not list(tmp_path.iterdir())
    run.engine.accountant.history = history
    assert run.engine.get_epsilon(DELTA) > 0


def test_what_a_ledger_or_checkpoint_has_told_is_held_too(tmp_path):
    Run(tmp_path / "ledger").train(3).engine.close()
    engine = PrivacyEngine(ledger=tmp_path / "ledger")
    engine.accountant.history = []
    with pytest.raises(InvalidOptionError, match="lacks 3 releases"):
        engine.get_epsilon(DELTA)
    place = Run().train(2).save(tmp_path / "run.pt")
    run = Run().load(place)
    run.engine.accountant.history.clear()
    with pytest.raises(InvalidOptionError, match="lacks 2 releases"):
        run.train(1)


# What the user has recorded beside a training


@pytest.mark.parametrize("with_ledger", [False, True])
def test_what_was_recorded_by_hand_comes_back_with_a_checkpoint(with_ledger, tmp_path):
    ledger = tmp_path / "ledger" if with_ledger else None
    run = Run(ledger)
    run.engine.accountant.step(noise_multiplier=4.0, sample_rate=1.0)
    place = run.train(2).save(tmp_path / "run.pt")
    run.train(1)
    run.engine.close()
    resumed = Run(ledger)
    if with_ledger:
        # As a script does that records it at its beginning, each time.
        resumed.engine.accountant.step(noise_multiplier=4.0, sample_rate=1.0)
    resumed.load(place)
    held = {(sigma, rate): count for sigma, rate, count in resumed.engine.accountant.history}
    assert held == {(4.0, 1.0): 1, (1.0, 0.2): 3 if with_ledger else 2}


# Another training's ledger


@pytest.mark.parametrize(
    ("kind", "through"), [("another's", "checkpoint"), ("cut", "optimizer"), ("of an earlier time", "checkpoint")]
)
def test_a_ledger_that_would_lower_the_account_is_refused(kind, through, tmp_path):
    """With much noise in the other training, whose file would make ε a sixtieth of the truth."""
    path, others = tmp_path / "ledger", tmp_path / "others"
    Run(others, sigma=20.0).train(5).engine.close()
    run = Run(path, sigma=0.6).train(2)
    earlier = path.read_bytes()
    run.train(3)
    place, state = run.save(tmp_path / "run.pt"), run.optimizer.state_dict()
    run.engine.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes({"another's": others.read_bytes(), "cut": b"".join(lines[:-1])}.get(kind, earlier))
    resumed = Run(path, sigma=0.6)
    before, noise, held = parameters_of(resumed.model), resumed.noise, list(resumed.engine.accountant.history)
    loads = {"checkpoint": lambda: resumed.load(place), "optimizer": lambda: resumed.optimizer.load_state_dict(state)}
    with pytest.raises(ResumeError, match=r"Restore the ledger|Give the engine the ledger"):
        loads[through]()
    assert torch.equal(parameters_of(resumed.model), before)
    assert resumed.noise == noise
    assert resumed.engine.accountant.history == held
    assert not resumed.optimizer.state


class _NoKey:
    """Noise of the user's own, with a state that has no key."""

    level = "fast"

    def add_(self, tensor, std):
        tensor.add_(torch.randn_like(tensor), alpha=std)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


def test_noise_of_the_users_own_needs_no_key():
    run = Run()
    run.optimizer.noise_source = _NoKey()
    run.train(2)
    assert run.steps == run.optimizer.releases == 2
