"""Discrete Gaussian noise: the exact distribution, where float64 cannot decide too, and close to the continuous one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from ghostclip.errors import InvalidOptionError
from ghostclip.noise import ExactNoise, exact
from ghostclip.noise.exact import discrete_gaussian
from ghostclip.noise.keyed import Block, words_of
from ghostclip.noise.keys import RandomKey
from ghostclip.privacy.budget import discretisation_delta

DRAWS = 60_000


def words(position=0):
    """Streams that are the same in every run of the tests."""
    key = RandomKey("test")
    key.load("00112233445566778899aabbccddeeff")
    return lambda part, count: words_of(key, Block(position, 0, count), part=part, count=count)


def constant(value):
    return lambda part, count: np.full(count, value, dtype=np.uint64)


def masses(scale, reach):
    x = np.arange(-reach, reach + 1)
    mass = np.exp(-(x**2) / (2 * scale**2))
    return x, mass / mass.sum()


@pytest.mark.parametrize("scale", [0.4, 0.7, 1.0, 1.5, 4.0, 33.3])
def test_every_integer_has_its_probability(scale):
    values = discrete_gaussian(words(), DRAWS, scale)
    x, mass = masses(scale, math.ceil(9 * scale) + 2)
    counts = np.bincount(values - x[0], minlength=len(x))[: len(x)]
    assert counts.sum() == DRAWS
    often = DRAWS * mass >= 8
    expected = np.append(DRAWS * mass[often], max(DRAWS * mass[~often].sum(), 1e-9))
    observed = np.append(counts[often], counts[~often].sum())
    merged = expected >= 1
    assert observed[~merged].sum() <= 3
    chi2 = ((observed - expected) ** 2 / expected)[merged].sum()
    assert stats.chi2.sf(chi2, merged.sum() - 1) > 1e-4


def test_slow_decisions_are_the_fast_ones(monkeypatch):
    """With its tolerances widened, thousands of decisions go through decimal arithmetic and none of them changes."""
    slow = []
    for name in ("_exact_floor", "_exactly_below"):
        original = getattr(exact, name)
        monkeypatch.setattr(exact, name, lambda *given, f=original: slow.append(f.__name__) or f(*given))
    expected = [discrete_gaussian(words(), 300, scale) for scale in (0.9, 50.0, 2.0**24 / 3)]
    assert not slow
    monkeypatch.setattr(exact, "_LOG_ERROR", 2.0**-4)
    monkeypatch.setattr(exact, "_PROBABILITY_ERROR", 2.0**-3)
    for scale, values in zip((0.9, 50.0, 2.0**24 / 3), expected, strict=True):
        assert np.array_equal(discrete_gaussian(words(), 300, scale), values)
    assert slow.count("_exact_floor") > 500
    assert slow.count("_exactly_below") > 300


def test_further_bits_decide_where_63_do_not():
    """A uniform begins with the 63 bits of exp(-1): with zeros after them it is below, with ones above."""
    word = 3393088950634442637
    assert math.isclose(word / 2**63, math.exp(-1))
    below, above = (exact._MoreBits(constant(value), 0) for value in (0, 2**64 - 1))
    assert exact._exact_floor(word, 1, below) == 1
    assert exact._exact_floor(word, 1, above) == 0
    below, above = (exact._MoreBits(constant(value), 0) for value in (0, 2**64 - 1))
    assert exact._exactly_below(word, 1, below)
    assert not exact._exactly_below(word, 1, above)
    found = exact._floor_of_exponential(np.array([word, word], dtype=np.uint64), 1, exact._MoreBits(words(), 9))
    assert set(found.tolist()) <= {0, 1}


def test_exact_noise_is_for_integers():
    source = ExactNoise()
    total = torch.full((2001,), 7)
    source.add_(total, 40.0)
    assert total.dtype == torch.int64
    assert 3 < total.double().mean().item() < 11
    assert 36 < total.double().std().item() < 44
    with pytest.raises(InvalidOptionError, match=r"float32: exact noise .*'hooks'"):
        source.add_(torch.zeros(3), 1.0)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_divergences_are_at_most_those_of_the_continuous_gaussian(scale, shift):
    """Of whole orders, with and without sampling: E_0[((1 - q) + q·P_1/P_0)^α] term by term."""
    x, mass = masses(scale, math.ceil(60 * scale) + 400)
    log_ratio = (2 * x * shift - shift**2) / (2 * scale**2)
    for order in (2, 3, 8, 20):
        log_terms = np.log(mass, where=mass > 0, out=np.full(len(x), -np.inf)) + order * log_ratio
        divergence = np.logaddexp.reduce(log_terms) / (order - 1)
        continuous = order * shift**2 / (2 * scale**2)
        assert divergence <= continuous * (1 + 1e-9) + 1e-12
        for q in (0.01, 0.3):
            mixed = np.logaddexp(math.log1p(-q), math.log(q) + log_ratio)
            with np.errstate(divide="ignore"):
                sampled = np.logaddexp.reduce(np.log(mass) + order * mixed)
            terms = [
                math.log(math.comb(order, k)) + k * math.log(q) + (order - k) * math.log1p(-q)
                + k * (k - 1) * shift**2 / (2 * scale**2)
                for k in range(order + 1)
            ]  # fmt: skip
            assert sampled <= np.logaddexp.reduce(terms) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("scale", [4.0, 5.5, 8.0, 16.0])
def test_the_divergence_of_discrete_noise_from_a_rounded_gaussian_is_bounded(scale):
    x = np.arange(-math.ceil(12 * scale), math.ceil(12 * scale) + 1)
    discrete = np.exp(-(x**2) / (2 * scale**2))
    discrete /= discrete.sum()
    # Far tails as differences of the same side's tail function, which does not cancel.
    side = np.abs(x)
    rounded = special.ndtr(-(side - 0.5) / scale) - special.ndtr(-(side + 0.5) / scale)
    divergence = float((discrete * -np.log(rounded / discrete)).sum())
    assert 0.5 / (576 * scale**4) < divergence < 1 / (320 * scale**4)
    variation = np.abs(discrete - rounded).sum() / 2
    assert (1 + math.e) * variation <= discretisation_delta(1.0, scale=scale, coordinates=1, steps=1)


def test_discretisation_is_negligible_on_the_default_grid():
    assert discretisation_delta(3.0, scale=2.0**24, coordinates=10**8, steps=10_000) < 1e-8
    small, large = (discretisation_delta(1.0, scale=100.0, coordinates=10, steps=steps) for steps in (1, 4))
    assert large == pytest.approx(2 * small)
    assert discretisation_delta(800.0, scale=4.0, coordinates=1, steps=1) == 1.0
