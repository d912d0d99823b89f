"""Noise of balls in bins, where a record takes part in exactly k of T steps, beside Poisson sampling of rate k/T."""

from __future__ import annotations

from itertools import product

from ghostclip.mechanisms import BallsInBins, PoissonSampling, plan_privacy

DELTA = 1e-5
SHAPES = ((100, 1), (100, 10), (390, 5), (1000, 1), (1000, 20))
GRID = tuple((steps, rounds, epsilon) for (steps, rounds), epsilon in product(SHAPES, (1.0, 3.0, 8.0)))
QUICK_GRID = ((20, 2, 3.0),)
_BATCH = 100


def compared(case: tuple[int, int, float]) -> dict[str, float]:
    """Return both noise multipliers for T steps of which a record is in k, at an ε and δ = 1e-5."""
    steps, rounds, epsilon = case
    sigma = {
        type(plan.mechanism): plan.noise_multiplier
        for plan in plan_privacy(
            num_samples=_BATCH * steps // rounds,
            batch_size=_BATCH,
            epochs=rounds,
            target_epsilon=epsilon,
            target_delta=DELTA,
            mechanisms=[PoissonSampling(), BallsInBins()],
        )
    }
    poisson, balls = sigma[PoissonSampling], sigma[BallsInBins]
    return {"steps": steps, "rounds": rounds, "epsilon": epsilon, "delta": DELTA, "poisson": poisson, "balls": balls}
