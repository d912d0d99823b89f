"""A training belongs to the process and the objects that it was made with; what frameworks copy and fork goes on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip.errors import CopyError
from tests.engine.training import Training, batch_of, declared, parameters_of, small_data, small_model
from tests.forked import FORKS, in_fork

DATA = small_data(40)
BATCH = batch_of(DATA, start=0, stop=8)
every_fork = pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
every_level = pytest.mark.parametrize("level", ["fast", "secure", "exact"])


def _private(engine, *, bound=1.0, several=False):
    model = small_model()
    matrices, rest = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    if several:
        inner = [torch.optim.SGD(part, lr=1.0) for part in (matrices, rest)]
    return engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=declared(DATA, 8),
        noise_multiplier=2.0,
        max_grad_norm=bound,
        grad_sample_mode="hooks",
    )


def _backward(model):
    nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()


@every_level
@every_fork
@pytest.mark.parametrize("stage", ["made", "released", "accumulated", "in mid batch"])
def test_a_fork_of_a_training_releases_nothing(level, fork, stage):
    engine = ghostclip.PrivacyEngine(noise_level=level)
    model, optimizer, _ = _private(engine)
    if stage != "made":
        _backward(model)
        optimizer.step()
    if stage in ("accumulated", "in mid batch"):
        _backward(model)
    if stage == "in mid batch":
        optimizer.signal_skip_step()
        optimizer.step()
    before = len(engine.accountant)

    def child():
        weights = parameters_of(model)
        if stage != "accumulated":
            _backward(model)
        with pytest.raises(CopyError, match=r"fork.*make_private"):
            optimizer.step()
        assert torch.equal(parameters_of(model), weights)
        with pytest.raises(CopyError, match=r"PrivacyEngine"):
            _private(engine)
        return len(engine.accountant), engine.get_epsilon(1e-5)

    assert in_fork(child, fork=fork) == (before, engine.get_epsilon(1e-5))
    if stage != "accumulated":
        _backward(model)
    optimizer.step()
    assert len(engine.accountant) == before + 1


def test_a_fork_of_several_optimizers_and_of_one_built_by_hand_releases_nothing():
    model, optimizers, _ = _private(ghostclip.PrivacyEngine(), several=True)
    by_hand = Training()
    _backward(model)
    by_hand.backward(BATCH)

    def child():
        for optimizer in optimizers:
            with pytest.raises(CopyError, match="fork"):
                optimizer.step()
            _backward(model)
        with pytest.raises(CopyError, match="fork"):
            by_hand.optimizer.step()
        by_hand.backward(BATCH)
        by_hand.optimizer.clip_and_accumulate()
        with pytest.raises(CopyError, match="fork"):
            by_hand.optimizer.add_noise()
        return by_hand.releases

    assert in_fork(child) == 0
    for optimizer in (*optimizers, by_hand.optimizer):
        optimizer.step()


@every_level
@every_fork
def test_trainings_that_two_forks_make_for_themselves_share_no_noise_and_no_batch(level, fork):
    """An engine that was not used yet is no more than its options."""
    engine, model = ghostclip.PrivacyEngine(noise_level=level), nn.Linear(40, 50)
    data = torch.utils.data.TensorDataset(torch.randn(200, 40), torch.randint(0, 50, (200,)))

    def child():
        private, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=20),
            noise_multiplier=2.0,
            max_grad_norm=0.01,
            grad_sample_mode="hooks",
        )
        inputs, targets = next(iter(loader))
        nn.functional.cross_entropy(private(inputs), targets).backward()
        optimizer.step()
        assert len(engine.accountant) == 1
        return 20 * torch.cat([p.grad.flatten() for p in model.parameters()]), inputs

    (first, inputs), (second, others) = in_fork(child, fork=fork), in_fork(child, fork=fork)
    want = 2.0 * 0.01 * 2**0.5
    assert 0.93 * want < (first - second).std() < 1.07 * want
    assert inputs.shape != others.shape or not torch.equal(inputs, others)


COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}


@pytest.mark.parametrize("copied", COPIERS.values(), ids=COPIERS)
def test_a_copy_of_an_engine_is_as_good_as_new_or_refused(copied):
    engine = ghostclip.PrivacyEngine()
    _private(copied(engine))
    model, optimizer, _ = _private(engine)
    _backward(model)
    optimizer.step()
    account = copied(engine._account) if copied is COPIERS["deepcopy"] else None
    twin = copy.copy(engine)
    if account is not None:
        twin._account = account
        with pytest.raises(CopyError, match="PrivacyEngine"):
            _private(twin)
        # What it knows may still be asked for.
        assert twin.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


def test_what_frameworks_copy_goes_on():
    """Averages of weights, copies of models, of states and of accountants are nobody's second training."""
    engine = ghostclip.PrivacyEngine()
    model, optimizer, _ = _private(engine)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(average)]
        _backward(model)
        optimizer.step()
        average.update_parameters(model)
        for twin in twins:
            twin(BATCH[0]).sum().backward()
        copy.deepcopy(optimizer.state_dict())
        assert copy.deepcopy(engine.accountant).get_epsilon(1e-5) == engine.get_epsilon(1e-5)
        optimizer.zero_grad()
    assert len(engine.accountant) == 2


def _said_in(child_trains_on, caplog):
    """What a fork says that makes a training."""

    def child():
        caplog.clear()
        child_trains_on()
        return caplog.text

    return in_fork(child)


def test_a_fork_that_trains_with_an_engine_of_another_process_says_where_the_account_is(caplog):
    engine = ghostclip.PrivacyEngine()
    said = _said_in(lambda: _private(engine), caplog)
    assert "ε is known here alone" in said
    assert "ledger" in said
    assert "known here alone" not in _said_in(lambda: _private(ghostclip.PrivacyEngine()), caplog)
