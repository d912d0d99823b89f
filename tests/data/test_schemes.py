"""Every way to sample: its distribution, its public constants and its accounting event."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from ghostclip.accounting.history import SamplingEvent
from ghostclip.data import DeclaredSampling, Poisson, PrivateSampler, Shuffled, UserDataset, UserPoisson
from ghostclip.errors import DataError, FixedSeedWarning, InvalidOptionError, ResumeError
from ghostclip.noise.keys import RandomKey, WordStream, permutation, subset


def key():
    found = RandomKey("test")
    found.load("00112233445566778899aabbccddeeff")
    return found


def seeded(scheme):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return PrivateSampler(scheme, seed=3)


def chi2_p(observed, expected):
    return stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1)


# The selections


def test_permutations_and_subsets_are_uniform():
    counts = np.zeros((6, 6))
    orders: dict[tuple, int] = {}
    for i in range(6000):
        order = permutation(WordStream(key(), i), 6)
        counts[np.arange(6), order] += 1
        short = tuple(permutation(WordStream(key(), 10_000 + i), 3).tolist())
        orders[short] = orders.get(short, 0) + 1
    assert all(chi2_p(row, np.full(6, 1000.0)) > 1e-5 for row in counts)
    assert chi2_p(np.array(list(orders.values())), np.full(6, 1000.0)) > 1e-4
    pairs: dict[tuple, int] = {}
    for i in range(6000):
        pair = tuple(subset(WordStream(key(), i), np.array([3, 5, 7, 9]), 2).tolist())
        pairs[pair] = pairs.get(pair, 0) + 1
    assert set(pairs) == set(itertools.combinations((3, 5, 7, 9), 2))
    assert chi2_p(np.array(list(pairs.values())), np.full(6, 1000.0)) > 1e-4
    assert subset(WordStream(key(), 0), np.array([3, 5]), 2).tolist() == [3, 5]


# Truncated Poisson


def test_truncated_batches_are_random_subsets_of_poisson_batches():
    """P(record in batch) = Σ_k P(size k)·min(k, B)/N, the same for all records; sizes are min(k, B)."""
    records, rate, most, draws = 30, 0.2, 7, 12_000
    scheme, whole = (
        Poisson(num_samples=records, sample_rate=rate, truncation=most),
        Poisson(num_samples=records, sample_rate=rate),
    )
    sampler, untruncated = seeded(scheme), seeded(whole)
    mask = np.zeros((draws, records), dtype=bool)
    for row in range(draws):
        batch = sampler.draw(row)
        assert batch == sorted(batch)
        full = untruncated.draw(row)
        assert batch == full if len(full) <= most else set(batch) < set(full)
        mask[row, batch] = True
    sizes = np.arange(records + 1)
    chance = (stats.binom.pmf(sizes, records, rate) * np.minimum(sizes, most)).sum() / records
    inclusions = mask.sum(axis=0)
    assert stats.chi2.sf(((inclusions - draws * chance) ** 2).sum() / (draws * chance), records) > 1e-4
    assert mask.sum(axis=1).max() == most
    expected = draws * np.append(stats.binom.pmf(sizes[:most], records, rate), stats.binom.sf(most - 1, records, rate))
    assert chi2_p(np.bincount(mask.sum(axis=1)), expected) > 1e-4
    event = sampler.event
    assert (event.kind, event.truncation, event.num_units, event.sample_rate) == ("truncated_poisson", 7, 30, 0.2)
    assert sampler.expected_batch_size == 6.0
    with pytest.raises(InvalidOptionError, match="truncation=5"):
        Poisson(num_samples=30, sample_rate=0.2, truncation=5)


# Full and shuffled batches


@pytest.mark.parametrize(("records", "size"), [(12, 4), (10, 4), (7, 7), (147, 3)])
def test_a_shuffled_epoch_has_every_record_once(records, size):
    sampler = PrivateSampler(Shuffled(num_samples=records, batch_size=size))
    epochs = [list(sampler) for _ in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(records))
        assert [len(batch) for batch in epoch[:-1]] == [size] * (len(epoch) - 1)
    assert len(epochs[0]) == len(sampler) == math.ceil(records / size) == sampler.event.steps_per_event
    assert size == records or epochs[0] != epochs[1]
    assert (sampler.event.kind, sampler.event.sample_rate) == ("shuffled", 1.0)


def test_an_abandoned_shuffled_epoch_is_over_and_a_resumed_one_goes_on():
    """No record of an epoch is in two of its batches, whatever was left early: an epoch is one participation."""
    sampler = seeded(Shuffled(num_samples=20, batch_size=4))
    whole = [sampler.draw(position) for position in range(15)]
    first = list(itertools.islice(sampler, 2))
    state = sampler.state_dict()
    second = list(sampler)
    assert first == whole[:2]
    assert second == whole[5:10]
    resumed = seeded(Shuffled(num_samples=20, batch_size=4))
    resumed.load_state_dict(state)
    assert list(resumed) == whole[2:5]
    assert list(resumed) == whole[5:10]
    with pytest.raises(ResumeError, match="kind='shuffled'"):
        seeded(Poisson(num_samples=20, sample_rate=1.0)).load_state_dict(state | {"truncation": None})


# Users


OWNERS = ["ann"] * 5 + ["bo"] * 1 + ["cy"] * 2 + ["ann"] * 4


def test_users_join_with_at_most_k_of_their_records():
    sampler = seeded(UserPoisson(OWNERS, sample_rate=0.25, max_records=3))
    owner = np.array(OWNERS)
    sizes, together, ann = [], 0, np.zeros(12)
    for position in range(8000):
        batch = sampler.draw(position)
        assert batch == sorted(set(batch))
        names, counts = np.unique(owner[batch], return_counts=True)
        taken = dict(zip(names.tolist(), counts.tolist(), strict=True))
        assert all(taken[name] == {"ann": 3, "bo": 1, "cy": 2}[name] for name in taken)
        together += {"ann", "bo"} <= set(taken)
        sizes.append(len(batch))
        ann[[record for record in batch if OWNERS[record] == "ann"]] += 1
    assert abs(np.mean(sizes) - sampler.expected_batch_size) < 0.1
    assert sampler.expected_batch_size == 0.25 * (3 + 1 + 2)
    assert abs(together / 8000 - 0.0625) < 4.5 * (0.0625 / 8000) ** 0.5
    hers = ann[[record for record in range(12) if OWNERS[record] == "ann"]]
    assert abs(hers.sum() - 8000 * 0.25 * 3) < 4.5 * 3 * (8000 * 0.25 * 0.75) ** 0.5
    assert chi2_p(hers, np.full(9, hers.sum() / 9)) > 1e-4


def test_a_user_is_the_unit_and_its_records_the_factor():
    scheme = UserPoisson(torch.tensor([4, 4, 7]), sample_rate=0.5, max_records=8, expected_batch_size=2)
    assert (scheme.event.unit, scheme.event.records_per_unit, scheme.event.num_units) == ("user", 8, 2)
    assert (scheme.num_samples, scheme.num_users, scheme.steps, scheme.expected_batch_size) == (3, 2, 2, 2.0)
    assert scheme.draw(key(), 0).dtype == np.int64
    assert scheme.event.relation == "zero_out"
    for wrong, match in (
        ({"max_records": 0}, "max_records"),
        ({"sample_rate": 0}, "sample_rate"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
    ):
        with pytest.raises(InvalidOptionError, match=match):
            UserPoisson([1], **{"sample_rate": 0.5, "max_records": 1} | wrong)
    with pytest.raises(DataError, match="users: empty"):
        UserPoisson([], sample_rate=0.5, max_records=1)
    with pytest.raises(DataError, match="users: 1 given for 2 records"):
        UserDataset([7, 8], [0], max_records=1)
    for name, steps in {
        "steps": lambda: Poisson(num_samples=4, sample_rate=0.5, epoch_steps=0),
        "steps_per_epoch": lambda: DeclaredSampling(
            sample_rate=0.5, expected_batch_size=2, num_units=4, steps_per_epoch=0
        ),
    }.items():
        with pytest.raises(InvalidOptionError, match=f"{name}=0"):
            steps()


# Public constants and events


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "weighted"}, "kind"),
        ({"relation": "replace"}, "relation"),
        ({"unit": "row"}, "unit"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"kind": "full"}, "it must be 1"),
        ({"truncation": 5}, "truncation=5"),
        ({"kind": "truncated_poisson"}, "truncation=None"),
        ({"kind": "truncated_poisson", "truncation": 0}, "truncation=0"),
        ({"kind": "shuffled", "sample_rate": 1.0, "relation": "add_remove"}, "add_remove"),
        ({"records_per_unit": 0}, "records_per_unit"),
        ({"steps_per_event": 0}, "steps_per_event"),
        ({"num_units": 0}, "num_units"),
    ],
)
def test_events_that_make_no_sense_are_refused(change, match):
    with pytest.raises(InvalidOptionError, match=match):
        SamplingEvent(**{"kind": "poisson", "sample_rate": 0.5, "num_units": 4} | change)
