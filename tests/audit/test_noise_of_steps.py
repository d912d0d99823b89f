"""The noise of whole steps, beyond what the checks of `checks` ask: resuming, and tails that take long to see."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from ghostclip.noise import make_noise_source
from tests.audit.subject import Subject, quietly, records

FLOAT32_CUT = math.sqrt(2 * 24 * math.log(2))
BLOCK = 1 << 24


def test_a_resumed_optimizer_releases_what_the_interrupted_one_would_have():
    interrupted = Subject(seed=None)
    interrupted.vector(records())
    state = interrupted.optimizer.noise_source.state_dict()
    expected = [interrupted.vector(records()) for _ in range(3)]
    resumed = Subject(seed=None)
    elsewhere = resumed.vector(records())
    resumed.optimizer.noise_source.load_state_dict(state)
    again = [resumed.vector(records()) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert not torch.equal(elsewhere, again[0])
    assert len({tuple(release.tolist()) for release in again}) == 3


def test_two_engines_never_share_noise():
    first, second = (Subject(seed=None).vector(records()) for _ in range(2))
    assert (first != second).all()


@pytest.mark.slow
def test_tails_go_beyond_the_cut_of_a_float32_generator():
    """6e8 draws: 4.8 are expected beyond 5.77 standard deviations, where such a generator has none; 346 beyond 5.

    The stream is a fixed one: of fresh ones, one in 120 would have none.
    """
    source = quietly(make_noise_source, level="fast", seed=1)
    draws, beyond_five, beyond_the_cut = 36 * BLOCK, 0, 0
    values = torch.empty(BLOCK, dtype=torch.float64)
    for _ in range(draws // BLOCK):
        source.add_(values.zero_(), 1.0)
        far = values.abs_()[values > 5]
        beyond_five += far.numel()
        beyond_the_cut += int((far > FLOAT32_CUT).sum())
    assert stats.binomtest(beyond_five, draws, 2 * stats.norm.sf(5)).pvalue > 1e-6
    assert 0 < beyond_the_cut <= stats.poisson.ppf(1 - 1e-6, draws * 2 * stats.norm.sf(FLOAT32_CUT))
