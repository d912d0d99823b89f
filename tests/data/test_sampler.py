"""Poisson sampling: the distribution the accountant assumes, no batch twice, exact resume."""

from __future__ import annotations

import io
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from ghostclip.data import PoissonSampler
from ghostclip.errors import FixedSeedWarning, InvalidOptionError, ResumeError


def seeded(number=7, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return PoissonSampler(**{"num_samples": 50, "sample_rate": 0.1, "seed": number} | options)


def masks(sampler, count):
    mask = np.zeros((count, sampler.num_samples), dtype=bool)
    for row in range(count):
        mask[row, sampler.draw(row)] = True
    return mask


def test_every_record_joins_independently_with_probability_q():
    q, draws = 0.1, 20_000
    mask = masks(seeded(), draws)
    records = mask.shape[1]
    inclusions = mask.sum(axis=0)
    assert stats.chi2.sf(((inclusions - draws * q) ** 2).sum() / (draws * q * (1 - q)), records) > 1e-4
    observed = np.bincount(mask.sum(axis=1), minlength=records + 1)[:12]
    expected = draws * stats.binom.pmf(np.arange(12), records, q)
    assert stats.chi2.sf((((observed - expected) ** 2) / expected).sum(), 11) > 1e-4
    together = (mask.T.astype(float) @ mask.astype(float))[np.triu_indices(records, 1)] / draws
    assert np.abs(together - q * q).max() < 5.5 * np.sqrt(q * q * (1 - q * q) / draws)
    following = (mask[1:] & mask[:-1]).mean(axis=0)
    assert np.abs(following - q * q).max() < 5 * np.sqrt(q * q / draws)


def test_neither_torch_nor_numpy_seeds_reach_it():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        drawn.append(list(PoissonSampler(num_samples=1000, sample_rate=0.1)))
    assert drawn[0] != drawn[1]
    before = torch.get_rng_state()
    list(PoissonSampler(num_samples=1000, sample_rate=0.1))
    assert torch.equal(before, torch.get_rng_state())


def test_an_explicit_seed_or_generator_repeats_and_warns():
    with pytest.warns(FixedSeedWarning, match="explicit seed"):
        first = PoissonSampler(num_samples=50, sample_rate=0.1, seed=3)
    assert list(first) == list(seeded(3)) != list(seeded(4))
    with pytest.warns(FixedSeedWarning, match="explicit generator"):
        by_generator = [
            list(PoissonSampler(num_samples=50, sample_rate=0.1, generator=torch.Generator().manual_seed(s)))
            for s in (5, 5, 6)
        ]
    assert by_generator[0] == by_generator[1] != by_generator[2]
    with pytest.raises(InvalidOptionError, match="both given"):
        PoissonSampler(num_samples=5, sample_rate=0.1, seed=1, generator=torch.Generator())


def test_no_batch_is_drawn_twice_even_after_an_abandoned_epoch():
    sampler = seeded(sample_rate=0.2)
    seen = []
    for _ in range(3):
        for batch in sampler:
            seen.append(batch)
            if len(seen) % 5 == 2:
                break
    seen += list(sampler)
    assert seen == [seeded(sample_rate=0.2).draw(i) for i in range(len(seen))]


@pytest.mark.parametrize("taken", [0, 1, 4, 10, 13])
def test_a_resumed_run_draws_what_was_left(taken):
    whole = [seeded().draw(i) for i in range(30)]
    sampler, got = seeded(), []
    while len(got) < taken:
        for batch in sampler:
            got.append(batch)
            if len(got) == taken:
                break
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed = PoissonSampler(num_samples=50, sample_rate=0.1)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    rest = list(resumed)
    assert len(rest) == (10 - taken % 10 if taken % 10 else 10)
    assert got + rest + list(resumed) == whole[: taken + len(rest) + 10]


def test_replicas_share_one_draw():
    whole = seeded()
    state = whole.state_dict()
    parts = []
    for rank in range(3):
        part = PoissonSampler(num_samples=50, sample_rate=0.1)
        part.load_state_dict(state)
        part.deal(rank, 3)
        parts.append(list(part))
    for batch, *shards in zip(whole, *parts, strict=True):
        assert sorted(itertools.chain(*shards)) == batch
    with pytest.raises(InvalidOptionError, match="rank=3"):
        whole.deal(3, 3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_samples": 51}, "num_samples=51"),
        ({"sample_rate": 0.2}, "sample_rate=0.2"),
        ({"key": "xyz"}, "hexadecimal"),
        ({"key": None}, "hexadecimal"),
        ({"key": "00"}, "1 bytes"),
        ({"position": ...}, "missing position"),
    ],
)
def test_foreign_state_is_refused(change, match):
    state = {key: value for key, value in (seeded().state_dict() | change).items() if value is not ...}
    with pytest.raises(ResumeError, match=match):
        seeded().load_state_dict(state)
