"""ε of an account whose noise was discrete: what the accountant says, and the δ that discreteness costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from torch import nn

from ghostclip.accounting import Accountant, Bounds
from ghostclip.accounting.discrete_gaussian import MIN_SCALE, discretisation_delta
from ghostclip.noise import Grid
from ghostclip.privacy.charges import charges_of

STEPS_PER_BOUND = Grid.for_norm(1.0).bound
"""C in steps of the grid that releases are rounded to."""

_ROUNDS = 20
_MARGIN = 1e-3


def released_bounds(accountant: Accountant, delta: float, *, coordinates: int) -> Bounds:
    """Return bounds on the ε of an account, discrete noise included.

    With s = σ·2^24 for the smallest σ of the account, d coordinates and T steps, discreteness costs at most
    δ'(ε) = (1 + e^ε)·√(d·T / 640) / s². The result is an ε with ε_continuous(δ - δ'(ε₀)) = ε for some ε₀ ≥ ε: as δ'
    grows with ε, the account is (ε, δ - δ'(ε₀) + δ'(ε))-private, and so (ε, δ)-private.

    Privacy:
        The upper bound holds whatever part of the account was released with discrete noise: all of it counts as such.
        The lower one is that of continuous noise.
    """
    bounds = accountant.epsilon_bounds(delta)
    noisy = [(sigma, count) for sigma, count in _sigmas(accountant) if 0 < sigma < math.inf]
    if not coordinates or not noisy or math.isinf(bounds.upper):
        return bounds
    scale, steps = min(sigma for sigma, _ in noisy) * STEPS_PER_BOUND, sum(count for _, count in noisy)
    upper = bounds.upper
    for _ in range(_ROUNDS if scale >= MIN_SCALE else 0):
        guess = upper * (1 + _MARGIN) + 1e-9
        cost = discretisation_delta(guess, scale=scale, coordinates=coordinates, steps=steps)
        left = math.nextafter(delta - cost, 0.0)
        if left <= 0:
            break
        upper = accountant.get_epsilon(left)
        if upper <= guess:
            return Bounds(min(bounds.lower, upper), upper)
    return Bounds(bounds.lower, math.inf)


def coordinates_of(module: nn.Module, noise_level: str) -> int:
    """Return how many numbers a release with discrete noise has; 0 for continuous noise."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad) if noise_level == "exact" else 0


def _sigmas(accountant: Accountant) -> Iterator[tuple[float, int]]:
    """Yield (σ, number) of all noisy steps; a guarantee that was recorded as such has no σ."""
    for first, second, count in charges_of(accountant):
        if first == "truncated_poisson":
            yield cast("tuple[float, ...]", second)[0], count
        elif first == "allocation":
            sigma, steps = cast("tuple[float, ...]", second)
            yield sigma, count * int(steps)
        elif not isinstance(first, str):
            yield first, count
