"""The settings: 200 usual ones and 50 at the edges."""

from __future__ import annotations

from itertools import product

Setting = tuple[tuple[tuple[float, float, int], ...], float]
"""(history as (σ, q, steps), δ)."""


def usual() -> list[Setting]:
    """Return σ .5-4, q 1e-4-.1, T 1e2-1e6, δ 1e-5 and 1e-8: 200 settings."""
    sigmas, rates = (0.5, 0.7, 1.0, 2.0, 4.0), (1e-4, 1e-3, 1e-2, 1e-1)
    steps, deltas = (100, 1_000, 10_000, 100_000, 1_000_000), (1e-5, 1e-8)
    return [(((s, q, t),), d) for s, q, t, d in product(sigmas, rates, steps, deltas)]


def edges() -> list[Setting]:
    """Return 50 settings of extreme values, and histories of several kinds of steps."""
    found: list[Setting] = []
    for sigma, rate in product((0.3, 1.0, 20.0), (1e-6, 0.5, 1.0)):
        found += [(((sigma, rate, steps),), delta) for steps, delta in ((1, 1e-5), (1, 1e-12), (10_000_000, 1e-12))]
    found += [(((0.3, q, t),), d) for q, t, d in ((1e-2, 1, 1e-5), (1e-3, 100, 1e-5), (1e-4, 10**7, 1e-5))]
    found += [(((20.0, q, t),), d) for q, t, d in ((0.999, 2, 1e-12), (0.01, 10**7, 1e-5), (0.1, 1_000, 1e-12))]
    found += [(((1.0, q, t),), d) for q, t, d in ((0.9, 10, 1e-6), (0.3, 3, 1e-9), (1e-5, 10**7, 1e-6))]
    found += [(((5.0, 1.0, t),), 1e-6) for t in (10, 1_000)]
    found += [(((0.8, 0.01, 1_000), (1.2, 0.01, 1_000)), d) for d in (1e-5, 1e-12)]
    found += [(((1.0, 0.01, 1_000), (10.0, 1.0, 1)), 1e-6), (((0.6, 0.001, 10_000), (2.0, 0.1, 100)), 1e-6)]
    found += [(tuple((0.8 + 0.01 * k, 0.01, 100) for k in range(20)), d) for d in (1e-5, 1e-8)]
    found += [(tuple((1.0, 0.002 * (k + 1), 50) for k in range(10)), d) for d in (1e-5, 1e-8)]
    found += [(((1.0, 1e-3, 1), (3.0, 0.05, 2_000)), 1e-7), (((2.0, 0.02, 500), (0.7, 1e-4, 500)), 1e-7)]
    found += [(((1.5, 0.004, 12_345),), 3e-6), (((0.9, 0.017, 771),), 1e-6)]
    return found
