"""Correlated noise's matrices: against dense ones, and sensitivity against every pattern and sign."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.linalg import toeplitz

from ghostclip.errors import InvalidOptionError
from ghostclip.mechanisms.toeplitz import (
    Filter,
    Workload,
    error,
    inverse_of,
    of_inverse,
    optimal,
    sensitivity,
    series,
    square_root_of_inverse,
)

COEFFICIENTS = [(1.0, -0.5), (1.0, -0.95), square_root_of_inverse(4), (1.0, 0.3, -0.4), (1.0, -0.2, -0.3, -0.4)]


def lower(column: object, steps: int) -> np.ndarray:
    padded = np.zeros(steps)
    padded[: len(np.atleast_1d(column))] = np.atleast_1d(column)[:steps]
    return toeplitz(padded, np.zeros(steps))


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_sensitivity_is_no_less_than_what_any_record_can_do(coefficients: tuple[float, ...]) -> None:
    steps, separation = 11, 4
    c = np.linalg.inv(lower(coefficients, steps))
    worst = 0.0
    for first in range(separation):
        columns = c[:, first::separation]
        for signs in itertools.product((-1, 0, 1), repeat=columns.shape[1]):
            worst = max(worst, float(np.linalg.norm(columns @ np.array(signs))))
    found = sensitivity(of_inverse(coefficients), steps, separation=separation)
    assert worst <= found
    if (c >= 0).all():
        assert found == pytest.approx(worst, rel=1e-6)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_error_is_that_of_dense_matrices(coefficients: tuple[float, ...], momentum: float) -> None:
    steps = 30
    weights = np.zeros((steps, steps))
    for step in range(steps):
        velocity = np.zeros(steps)
        parameter = np.zeros(steps)
        for later in range(step, steps):
            velocity[later] = momentum * (velocity[later - 1] if later else 0) + (1 - momentum) * (later == step)
            parameter[later] = (parameter[later - 1] if later else 0) + velocity[later]
        weights[:, step] = parameter
    dense = np.linalg.norm(weights @ lower(coefficients, steps)) / np.sqrt(steps)
    assert error(of_inverse(coefficients), steps, Workload(momentum)) == pytest.approx(dense, rel=1e-9)


def test_square_roots_and_inverses() -> None:
    steps = 40
    root = lower(square_root_of_inverse(steps), steps)
    assert np.allclose(root @ root @ lower(np.ones(steps), steps), np.eye(steps))
    assert np.allclose(
        lower(series(inverse_of(of_inverse((1.0, -0.5, -0.1))), steps), steps) @ lower((1.0, -0.5, -0.1), steps),
        np.eye(steps),
    )


@pytest.mark.parametrize("bands", [2, 4, 8])
@pytest.mark.parametrize("separation", [50, 400])
def test_optimal_coefficients_leave_less_than_square_roots_and_than_fewer_bands(bands: int, separation: int) -> None:
    def left(matrix: Filter) -> float:
        return error(matrix, 400) * sensitivity(matrix, 400, separation=separation)

    found = optimal("inverse", bands, 400, separation)
    assert len(found[0][0]) == bands
    assert left(found) < left(of_inverse(square_root_of_inverse(bands))) < left(of_inverse((1.0,)))
    assert bands == 2 or left(found) < left(optimal("inverse", bands // 2, 400, separation))


def test_a_matrix_whose_inverse_grows_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="grows without bound"):
        sensitivity(of_inverse((1.0, -3.0)), 2000, separation=100)
