"""Levels of noise through the engine: what each needs, what discreteness costs, and what the engine says of it all."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.accounting import create_accountant
from ghostclip.accounting.calibration import most_that_fit
from ghostclip.errors import InvalidOptionError
from ghostclip.privacy.budget import STEPS_PER_BOUND, Budget, released_bounds
from ghostclip.privacy.checkpoints import digest_of
from tests.engine.training import declared, small_data, small_model

DATA = small_data(64)
DELTA = 1e-5
COORDINATES = sum(p.numel() for p in small_model().parameters())


def made(engine, *, epsilon=None, **options):
    model = options.pop("module", None) or small_model()
    arguments = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": declared(DATA, 8),
        "max_grad_norm": 1.0,
        "grad_sample_mode": "hooks" if engine.noise_level == "exact" else "auto",
        **options,
    }
    if epsilon is None:
        return engine.make_private(noise_multiplier=1.0, **arguments)
    return engine.make_private_with_epsilon(target_epsilon=epsilon, target_delta=DELTA, epochs=2, **arguments)


def steps(private, number):
    model, optimizer = private[0], private[1]
    for start in range(0, 8 * number, 8):
        rows = [record % 64 for record in range(start, start + 8)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(DATA.tensors[0][rows]), DATA.tensors[1][rows]).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({}, "fast"),
        ({"secure_mode": True}, "secure"),
        ({"noise_level": "secure"}, "secure"),
        ({"noise_level": "exact", "secure_mode": True}, "exact"),
    ],
)
def test_level_is_what_was_asked_for(given, level):
    engine = PrivacyEngine(**given)
    private = made(engine)
    assert engine.noise_level == private[1].noise_source.level == level
    assert engine.secure_mode == (level != "fast")


@pytest.mark.parametrize("given", [{"noise_level": "fast", "secure_mode": True}, {"noise_level": "safe"}])
def test_levels_that_contradict_or_do_not_exist_are_refused(given):
    with pytest.raises(InvalidOptionError, match="noise_level"):
        PrivacyEngine(**given)


@pytest.mark.parametrize("mode", ["auto", "bookkeeping", "ghost", "fast"])
def test_exact_noise_asks_for_gradients_one_by_one(mode):
    model = small_model()
    with pytest.raises(InvalidOptionError, match="grad_sample_mode='hooks'"):
        made(PrivacyEngine(noise_level="exact"), module=model, grad_sample_mode=mode)
    made(PrivacyEngine(noise_level="exact"), module=model)


@pytest.mark.parametrize("clipping", ["adaptive", "per_layer"])
def test_exact_noise_asks_for_one_fixed_bound(clipping):
    with pytest.raises(InvalidOptionError, match="one fixed norm"):
        made(PrivacyEngine(noise_level="exact"), clipping=clipping)


def test_exact_release_is_whole_steps_of_the_grid():
    private = made(PrivacyEngine(noise_level="exact"), module=small_model().double(), data_loader=_doubles())
    inputs, targets = DATA.tensors[0][:8].double(), DATA.tensors[1][:8]
    nn.functional.cross_entropy(private[0](inputs), targets).backward()
    private[1].step()
    for p in private[0].parameters():
        in_steps = p.grad * 8 * STEPS_PER_BOUND
        assert torch.equal(in_steps, in_steps.round())
        assert in_steps.any()


def _doubles():
    return declared(torch.utils.data.TensorDataset(DATA.tensors[0].double(), DATA.tensors[1]), 8)


def test_engine_adds_what_discreteness_costs_and_refuses_a_delta_below_it():
    engine = PrivacyEngine(noise_level="exact", accountant="rdp")
    steps(made(engine), 6)
    assert engine.accountant.history == [(1.0, 0.125, 6)]
    wanted = released_bounds(engine.accountant, 1e-8, coordinates=COORDINATES).upper
    assert engine.get_epsilon(1e-8) == wanted > engine.accountant.get_epsilon(1e-8)
    with pytest.raises(InvalidOptionError, match=f"{COORDINATES} numbers"):
        engine.get_epsilon(1e-13)


def test_budgets_and_targets_leave_room_for_discreteness(monkeypatch):
    """A model of 10^17 numbers cannot be built here; its engine is told that it was."""
    for place in ("ghostclip.engine", "ghostclip.privacy.checkpoints"):
        monkeypatch.setattr(f"{place}.coordinates_of", lambda module, level: 10**17 if level == "exact" else 0)
    engine = PrivacyEngine(noise_level="exact", accountant="rdp")
    private = made(engine, epsilon=3.0, when_spent="stop")
    continuous = PrivacyEngine(accountant="rdp")
    less = made(continuous, epsilon=3.0)
    assert private[1].noise_multiplier > less[1].noise_multiplier
    steps(private, 25)
    assert len(engine.accountant) == 16
    assert engine.budget_spent
    assert 2.99 < engine.get_epsilon(DELTA) <= 3.0

    def fitting(coordinates):
        budget = Budget(5.0, 1e-7)
        budget.coordinates = coordinates
        return most_that_fit(lambda count: budget.fits(create_accountant("rdp"), [(2.0, 0.2, count)]), most=10_000)

    assert 1 <= fitting(10**13) < fitting(0)


def test_what_was_discrete_stays_so_in_ledgers_and_checkpoints(tmp_path):
    engine = PrivacyEngine(noise_level="exact", ledger=tmp_path / "ledger", accountant="rdp")
    private = made(engine)
    steps(private, 3)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=private[0], optimizer=private[1])
    spent = engine.get_epsilon(1e-8)
    again = PrivacyEngine(ledger=tmp_path / "ledger", accountant="rdp")
    assert again.get_epsilon(1e-8) == spent > again.accountant.get_epsilon(1e-8)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    unsealed = {**state, "ghostclip_ledger": None}
    del unsealed["ghostclip_digest"]
    torch.save({**unsealed, "ghostclip_digest": digest_of(unsealed)}, tmp_path / "run.pt")
    moved = PrivacyEngine(accountant="rdp", ledger=tmp_path / "later")
    other = made(moved)
    moved.load_checkpoint(path=tmp_path / "run.pt", module=other[0], optimizer=other[1], allow_mechanism_change=True)
    assert moved.get_epsilon(1e-8) == spent
    assert PrivacyEngine(accountant="rdp", ledger=tmp_path / "later").get_epsilon(1e-8) == spent


def test_delta_of_a_whole_record_warns_once():
    engine = PrivacyEngine()
    private = made(engine)
    steps(private, 1)
    with pytest.warns(UserWarning, match=r"not below 1/N"):
        engine.get_epsilon(1 / 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.get_epsilon(1 / 64)
        PrivacyEngine().get_epsilon(0.5)
    model = small_model()
    with pytest.warns(UserWarning, match="N = 64"):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=8),
            target_epsilon=1.0,
            target_delta=0.02,
            epochs=1,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize("level", ["fast", "secure", "exact"])
def test_summary_says_what_the_guarantee_is(level):
    engine = PrivacyEngine(noise_level=level)
    assert "ε ≤ 0.0000" in engine.summary(DELTA)
    steps(made(engine), 4)
    text = engine.summary(DELTA)
    bounds = engine.epsilon_bounds(DELTA)
    lower, upper = bounds.lower, bounds.upper
    shown = float(text.split("ε ≤ ")[1].split(",")[0])
    assert upper <= shown <= upper + 1e-4
    assert f"less than ε = {math.floor(lower * 1e4) / 1e4:.4f}" in text
    for phrase in ("δ = 1e-05", "nothing in its place", "64, is public", "q = 0.125", f"{level} noise", "losses"):
        assert phrase in text, phrase
    assert ("rounding of floating-point numbers" in text) == (level != "exact")
    assert "\n" not in text
