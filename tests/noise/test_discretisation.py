"""Discrete noise accounted as continuous: the divergence between the two is as small as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from ghostclip.privacy.budget import discretisation_delta


@pytest.mark.parametrize("scale", [4.0, 5.5, 8.0, 16.0])
def test_the_divergence_from_a_rounded_gaussian_is_bounded(scale):
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


def test_it_is_negligible_on_the_default_grid():
    assert discretisation_delta(3.0, scale=2.0**24, coordinates=10**8, steps=10_000) < 1e-8
    small, large = (discretisation_delta(1.0, scale=100.0, coordinates=10, steps=steps) for steps in (1, 4))
    assert large == pytest.approx(2 * small)
    assert discretisation_delta(800.0, scale=4.0, coordinates=1, steps=1) == 1.0
