"""Tails of a billion draws."""

from __future__ import annotations

import pytest
import torch

from ghostclip.noise import make_noise_source
from tests.noise import at_scale


def repeatable(level):
    """Draws the same in every run, so that no bound fails by chance."""
    source = make_noise_source(level=level)
    source.load_state_dict({**source.state_dict(), "key": "0123456789abcdef0123456789abcdef"})
    return drawing(source)


def drawing(source):
    def draw(count):
        values = torch.zeros(count, dtype=torch.float64)
        source.add_(values, 1.0)
        return values

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fast", "secure"])
def test_a_billion_draws_have_gaussian_tails(level):
    found = at_scale.tails(repeatable(level), 2**30)
    beyond = {row["beyond"]: row for row in found["rows"]}
    assert beyond[5.8]["expected"] > 7
    assert beyond[5.8]["count"] > 0
    assert min(row["p"] for row in found["rows"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fast", "secure"])
def test_large_samples_are_normal_and_uncorrelated(level):
    shape = at_scale.shape(repeatable(level), 2**25)
    assert min(shape["chi2_p"], shape["variance_p"]) > 1e-4
    # Two sources with one key draw the same: their correlation must be seen.
    assert at_scale.correlations(lambda: repeatable(level), 2**20)["p"] < 1e-9
    assert at_scale.correlations(lambda: drawing(make_noise_source(level=level)), 2**20)["p"] > 1e-6


def test_measures_see_a_wrong_distribution():
    generator = torch.Generator().manual_seed(1)
    wide = at_scale.shape(lambda count: torch.randn(count, generator=generator).double() * 1.003, 2**21)
    assert wide["variance_p"] < 1e-4
    flat = at_scale.shape(
        lambda count: torch.empty(count, dtype=torch.float64).uniform_(-1.7, 1.7, generator=generator), 2**21
    )
    assert flat["chi2_p"] < 1e-9
    cut = at_scale.tails(lambda count: torch.randn(count, generator=generator).clamp_(-4.9, 4.9), 2**23)
    assert cut["largest"] <= 4.9001
    assert cut["rows"][0]["p"] < 0.02
