"""Two processes train as one would: the same records, each on one rank, and the same noise, once."""

from __future__ import annotations

import pytest
import torch

from ghostclip.data import Poisson, PrivateSampler
from ghostclip.distributed.agreement import agree_on_noise_key, require_agreement, world_size
from ghostclip.distributed.release import noisy_sums_
from ghostclip.errors import FixedSeedWarning, InvalidOptionError
from ghostclip.noise import make_noise_source
from tests.compat.pairs import clipped_sum, small_model
from tests.distributed.ranks import LEVELS, RECORDS, SETTINGS, STD, WRAPPERS, find, many, model, train
from tests.distributed.spawned import found_by_ranks

pytestmark = pytest.mark.distributed
RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found, in the order of the ranks."""
    return found_by_ranks(find, RANKS, tmp_path_factory.mktemp("ranks"), meshes=False)


def alone(state):
    source = make_noise_source(level=state["level"])
    source.load_state_dict(state)
    return source


def test_every_draw_is_shared_out_without_repetition_or_loss(found):
    first, second = (rank["batches"] for rank in found)
    sampler = PrivateSampler(Poisson(num_samples=RECORDS, sample_rate=0.1))
    sampler.load_state_dict(first["state"])
    assert first["state"] == second["state"]
    assert first["expected"] == second["expected"] == 30
    assert len(first["delivered"]) == len(second["delivered"]) == 14
    for position, (one, two) in enumerate(zip(first["delivered"], second["delivered"], strict=True)):
        assert sorted(one + two) == sampler.draw(position)
        assert abs(len(one) - len(two)) <= 1
    assert len({tuple(batch) for batch in first["delivered"]}) == 14


def test_a_resumed_run_goes_on_on_every_rank(found):
    for rank in found:
        batches = rank["batches"]
        assert batches["resumed"][:10] == batches["delivered"][4:14]
        assert len(batches["resumed"]) == 6 + 10


def test_a_run_that_goes_back_draws_from_a_new_key_that_ranks_share(found):
    one, two = (rank["gone back"] for rank in found)
    assert one == two
    saved, at_once, after_a_step = one
    assert saved == at_once
    # Another set of processes may go on from the same state: equal noise would tell the difference of their sums.
    assert after_a_step != saved


def test_ranks_apart_do_not_share(found):
    assert [rank["batches"]["apart"] for rank in found] == [1, 1]


@pytest.mark.parametrize("level", LEVELS)
def test_each_rank_draws_its_share_of_the_noise_of_one_process(found, level):
    one, two = (rank["shares"][level] for rank in found)
    source, sums, again = alone(one["state"]), many(level), many(level)
    source.release_all_(sums, STD)
    for tensor in again:
        source.add_(tensor, STD)
    for rank in (one, two):
        assert all(map(torch.equal, rank["sums"], sums))
        assert all(map(torch.equal, rank["again"], again))
    elements = sum(tensor.numel() for tensor in sums)
    assert one["drawn"] + two["drawn"] == elements
    assert max(one["drawn"], two["drawn"]) < 0.6 * elements
    assert (one["drawn again"], two["drawn again"]) == (elements, 0)


def test_ranks_that_differ_are_refused_on_every_rank(found):
    for rank in found:
        sampling, level, step, noise, covered = rank["refused"]
        assert sampling.startswith("InvalidOptionError: sampling of rank 1 is {'kind': 'poisson', 'num_samples': 11")
        assert level.startswith("InvalidOptionError: level of noise of rank 1 is 'secure', of rank 0 'fast'")
        assert "same checkpoint" in step
        assert "at call 8', of rank 0 'fast" in noise
        assert "the noise of rank 1 is not that of rank 0" in covered


def test_without_other_ranks_nothing_is_exchanged():
    assert world_size() == 1
    require_agreement("step", 3)
    with pytest.raises(InvalidOptionError, match="init_process_group"):
        agree_on_noise_key(make_noise_source())
    source, plain = make_noise_source(), torch.zeros(5, 4)
    alone(source.state_dict()).add_(plain, 1.0)
    whole = torch.zeros(4, 5).t()
    noisy_sums_([whole], 1.0, source)
    assert torch.equal(plain, whole)


def test_16_bit_sums_are_refused():
    with pytest.raises(InvalidOptionError, match="bfloat16"):
        noisy_sums_([torch.zeros(3, dtype=torch.bfloat16)], 1.0, make_noise_source())


@pytest.mark.filterwarnings("ignore:noise_multiplier=0", "ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_ranks_train_the_model_that_one_process_trains(found, setting):
    """Through the engine, from models that started differently, in physical batches of 3, noise or none."""
    one, two = (rank["trained"][setting] for rank in found)
    assert one["states"] == two["states"]
    alone = train(0, *setting, states=one["states"])
    assert alone["level"] == one["level"] == setting[0]
    assert alone["epsilon"] == one["epsilon"] == two["epsilon"]
    start = list(model(0).parameters())
    for first, second, want, begun in zip(
        one["parameters"], two["parameters"], alone["parameters"], start, strict=True
    ):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-6)
        assert (first - begun).abs().max() > 1e-3


def test_ranks_follow_the_generator_of_the_first(found):
    first, second = (rank["reseeded"] for rank in found)
    assert first["keys"] == second["keys"]
    for one, other in zip(first["noise"], second["noise"], strict=True):
        assert torch.equal(one, other)
    alone = torch.Generator().manual_seed(10)
    with pytest.warns(FixedSeedWarning):
        source = make_noise_source(generator=alone)
    sums = [torch.zeros(5), torch.zeros(2)]
    source.release_all_(sums, STD)
    assert torch.equal(torch.cat(sums), first["noise"][1])
    assert "noise_generator of rank 1 is 'none'" in first["one sided"]


@pytest.mark.parametrize("wrapper", [wrapper.__name__ for wrapper in WRAPPERS])
def test_steps_by_opacus_names_are_those_of_one_process_with_one_draw_of_noise(found, wrapper):
    first, second = (rank["opacus"][wrapper] for rank in found)
    before = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    for rank in (first, second):
        torch.testing.assert_close(6 * (before - rank["states"][0]), clipped_sum(0.5))
    assert torch.equal(first["states"][1], second["states"][1])
    assert not torch.equal(first["states"][0], first["states"][1])
    assert len(first["batches"]) == len(second["batches"]) == 4
    assert all(not set(one) & set(two) for one, two in zip(first["batches"], second["batches"], strict=True))
    assert sum(map(len, first["batches"] + second["batches"])) > 0
