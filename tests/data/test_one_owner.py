"""What draws noise or batches is drawn from by one object in one process: never by a copy, never by a fork."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.utils.data import TensorDataset

from ghostclip.data import DPDataLoader, PoissonSampler, PrivateSampler, Shuffled, UserPoisson
from ghostclip.errors import CopyError
from ghostclip.noise import ExactNoise, FastNoise, SecureNoise
from tests.engine.training import small_data
from tests.forked import FORKS, in_fork
from tests.private_run import PrivateRun

pytestmark = pytest.mark.filterwarnings("ignore::ghostclip.errors.FixedSeedWarning")
RECORDS = TensorDataset(torch.arange(400.0))


def _saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": _saved,
}
NOISE = {"fast": FastNoise, "fast, seeded": lambda: FastNoise(seed=3), "secure": SecureNoise, "exact": ExactNoise}
SAMPLERS = {
    "Poisson": lambda: PoissonSampler(num_samples=400, sample_rate=0.1),
    "shuffled": lambda: PrivateSampler(Shuffled(num_samples=400, batch_size=40)),
    "users": lambda: PrivateSampler(UserPoisson([*range(200), *range(200)], sample_rate=0.2, max_records=1)),
    "loader": lambda: DPDataLoader(RECORDS, batch_size=40),
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
every_fork = pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
every_noise = pytest.mark.parametrize("make", NOISE.values(), ids=NOISE)
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def _noise(source):
    noise = torch.zeros(3000, dtype=torch.int64 if source.level == "exact" else torch.float64)
    source.add_(noise, 100.0)
    return noise.double()


def _joint_noise(source):
    parts = [torch.zeros(40, dtype=torch.int64 if source.level == "exact" else torch.float64) for _ in range(2)]
    source.release_all_(parts, 100.0, 1.0)
    return torch.cat(parts).double()


def _batch(sampler):
    """The next batch, as records."""
    batch = next(iter(sampler))
    return [int(record) for record in (batch[0] if isinstance(batch[0], torch.Tensor) else batch)]


@every_copy
@every_noise
def test_a_copy_of_a_noise_source_draws_nothing(make, copied):
    original = make()
    _noise(original)
    twin, position = copied(original), original.state_dict()["position"]
    revivals = (twin.skip, twin.renew_key, lambda: twin.load_state_dict(original.state_dict()))
    for use in (*revivals, lambda: _noise(twin), lambda: _joint_noise(twin)):
        with pytest.raises(CopyError, match=r"is a copy.*state_dict"):
            use()
    assert twin.state_dict()["position"] == position
    assert _noise(original).any()


def test_a_copy_of_a_shuffled_loader_hands_out_no_records_beyond_what_is_charged():
    with pytest.warns(UserWarning, match="full participation"):
        run = PrivateRun(small_data(50), poisson_sampling=False)
    batches, twin = iter(run.loader), copy.deepcopy(run.loader)
    next(batches)  # in its place a batch of as many records of the copy would be released
    run.step(next(batches))
    with pytest.raises(CopyError, match="Iterate over the one"):
        run.step(next(iter(twin)))
    run.step(next(batches))
    assert run.engine.accountant.history == [(1.0, 1.0, 1)]


@every_fork
@every_noise
def test_a_fork_draws_no_noise_that_its_parent_draws(make, fork):
    source = make()
    _noise(source)
    with pytest.raises(CopyError, match="fork"):
        in_fork(lambda: _noise(source), fork=fork)

    def renewed():
        source.renew_key()
        return _noise(source)

    theirs, ours = in_fork(renewed, fork=fork), _noise(source)
    assert 100 * 2**0.5 * 0.9 < (theirs - ours).std() < 100 * 2**0.5 * 1.1
    assert abs(torch.corrcoef(torch.stack([theirs, ours]))[0, 1]) < 0.1


@every_noise
def test_a_saved_state_is_a_continuation_also_in_a_fork(make):
    source, follower = make(), make()
    _noise(source)
    state = source.state_dict()
    follower.load_state_dict(state)
    want = _noise(source)
    assert torch.equal(_noise(follower), want)

    def resumed():
        own = make()
        own.load_state_dict(state)
        source.load_state_dict(state)
        return _noise(own), _noise(source)

    assert all(torch.equal(found, want) for found in in_fork(resumed))


@every_copy
@every_sampler
def test_a_copy_of_a_sampler_draws_nothing(make, copied):
    original = make()
    first = _batch(original)
    twin = copied(original)
    if isinstance(original, DPDataLoader) and copied is COPIES["copy"]:
        # It shares the sampler, whose batches are each drawn once.
        assert _batch(twin) != first
        return
    for use in (lambda: twin.load_state_dict(original.state_dict()), lambda: _batch(twin)):
        with pytest.raises(CopyError, match=r"is a copy.*state_dict"):
            use()
    assert _batch(original) != first


@every_fork
@every_sampler
def test_a_fork_draws_no_batch_that_its_parent_draws(make, fork):
    original = make()
    running = iter(original)
    next(running)
    for draw in (lambda: _batch(original), lambda: next(running)):
        with pytest.raises(CopyError, match="fork"):
            in_fork(draw, fork=fork)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_are_no_drawers(method):
    loader = DPDataLoader(RECORDS, batch_size=40, num_workers=1, multiprocessing_context=method)
    seen = [batch[0].numel() for batch in loader]
    assert len(seen) == 10
    assert sum(seen) > 200
