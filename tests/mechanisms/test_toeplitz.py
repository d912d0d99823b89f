"""Correlated noise's matrices: against dense ones, and sensitivity against every pattern and sign."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.linalg import toeplitz

from ghostclip.errors import InvalidOptionError
from ghostclip.mechanisms import (
    PREFIX_SUMS,
    Filter,
    Workload,
    buffered,
    error,
    inverse_of,
    of_inverse,
    optimal,
    powers,
    sensitivity,
    series,
)

COEFFICIENTS = [(1.0, -0.5), (1.0, -0.95), powers(0.5, 4), (1.0, 0.3, -0.4), (1.0, -0.2, -0.3, -0.4)]


def lower(column: object, steps: int) -> np.ndarray:
    padded = np.zeros(steps)
    padded[: len(np.atleast_1d(column))] = np.atleast_1d(column)[:steps]
    return toeplitz(padded, np.zeros(steps))


MATRICES = [
    *map(of_inverse, COEFFICIENTS),
    inverse_of(of_inverse((1.0, 0.6, 0.3))),
    inverse_of(of_inverse((1.0, 0.9, -0.4, 0.2))),
    buffered((0.98, 0.5), (0.8, 0.2)),
    buffered((0.9,), (-0.3,)),
]


@pytest.mark.parametrize("matrix", MATRICES)
def test_sensitivity_is_no_less_than_what_any_record_can_do(matrix: Filter) -> None:
    steps, separation = 11, 4
    c = np.linalg.inv(lower(series(matrix, steps), steps))
    worst = 0.0
    for first in range(separation):
        columns = c[:, first::separation]
        for signs in itertools.product((-1, 0, 1), repeat=columns.shape[1]):
            worst = max(worst, float(np.linalg.norm(columns @ np.array(signs))))
    found = sensitivity(matrix, steps, separation=separation)
    assert worst <= found
    if (c >= 0).all():
        assert found == pytest.approx(worst, rel=1e-6)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rates", [None, tuple(np.linspace(2.0, 0.1, 30).tolist())])
def test_error_is_that_of_dense_matrices(matrix: Filter, momentum: float, rates: tuple[float, ...] | None) -> None:
    steps = 30
    eta = rates or np.ones(steps)
    weights = np.zeros((steps, steps))
    for step in range(steps):
        velocity = np.zeros(steps)
        parameter = np.zeros(steps)
        for later in range(step, steps):
            velocity[later] = momentum * (velocity[later - 1] if later else 0) + (1 - momentum) * (later == step)
            parameter[later] = (parameter[later - 1] if later else 0) + eta[later] * velocity[later]
        weights[:, step] = parameter
    dense = np.linalg.norm(weights @ lower(series(matrix, steps), steps)) / np.sqrt(steps)
    assert error(matrix, steps, Workload(momentum, rates)) == pytest.approx(dense, rel=1e-9)


def test_square_roots_and_inverses() -> None:
    steps = 40
    root = lower(powers(0.5, steps), steps)
    assert np.allclose(root @ root @ lower(np.ones(steps), steps), np.eye(steps))
    assert np.allclose(
        lower(series(inverse_of(of_inverse((1.0, -0.5, -0.1))), steps), steps) @ lower((1.0, -0.5, -0.1), steps),
        np.eye(steps),
    )


@pytest.mark.parametrize("bands", [2, 4, 8])
@pytest.mark.parametrize("separation", [50, 400])
def test_optimal_coefficients_leave_less_than_square_roots_and_than_fewer_bands(bands: int, separation: int) -> None:
    def of(matrix: Filter) -> float:
        return left(matrix, separation=separation)

    found = optimal("inverse", bands, 400, separation)
    assert len(found[0][0]) == bands
    assert of(found) < of(of_inverse(powers(0.5, bands))) < of(of_inverse((1.0,)))
    assert bands == 2 or of(found) < of(optimal("inverse", bands // 2, 400, separation))


def left(matrix: Filter, workload: Workload = PREFIX_SUMS, *, steps: int = 400, separation: int = 100) -> float:
    return error(matrix, steps, workload) * sensitivity(matrix, steps, separation=separation)


def test_a_matrix_whose_inverse_grows_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="grows without bound"):
        sensitivity(of_inverse((1.0, -3.0)), 2000, separation=100)
