"""Correlated noise's matrices: against dense ones, and sensitivity against every pattern and sign."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.linalg import toeplitz

from ghostclip.errors import InvalidOptionError
from ghostclip.mechanisms.toeplitz import (
    PREFIX_SUMS,
    Filter,
    Workload,
    buffered,
    error,
    inverse_of,
    of_inverse,
    optimal,
    sensitivity,
    series,
    square_root,
    square_root_of_inverse,
)

COEFFICIENTS = [(1.0, -0.5), (1.0, -0.95), square_root_of_inverse(4), (1.0, 0.3, -0.4), (1.0, -0.2, -0.3, -0.4)]


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


@pytest.mark.parametrize("matrix", [of_inverse((1.0, -0.9)), optimal("buffered", 2, 3000, 500)])
def test_error_of_a_long_training_is_that_of_some_of_its_columns(matrix: Filter) -> None:
    workload = Workload(0.9, tuple(np.geomspace(1.0, 1e-2, 3000).tolist()))
    whole = error(matrix, 3000, workload, columns=3000)
    assert error(matrix, 3000, workload) == pytest.approx(whole, rel=1e-3)
    assert error(matrix, 3000, workload, columns=24) == pytest.approx(whole, rel=0.03)


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
    def of(matrix: Filter) -> float:
        return left(matrix, separation=separation)

    found = optimal("inverse", bands, 400, separation)
    assert len(found[0][0]) == bands
    assert of(found) < of(of_inverse(square_root_of_inverse(bands))) < of(of_inverse((1.0,)))
    assert bands == 2 or of(found) < of(optimal("inverse", bands // 2, 400, separation))


def left(matrix: Filter, workload: Workload = PREFIX_SUMS, *, steps: int = 400, separation: int = 100) -> float:
    return error(matrix, steps, workload) * sensitivity(matrix, steps, separation=separation)


@pytest.mark.parametrize(("family", "size"), [("inverse", 4), ("banded", 8), ("buffered", 3)])
@pytest.mark.parametrize("last", [1e-1, 1e-3])
def test_matrices_for_learning_rates_leave_less_in_their_workload(family: str, size: int, last: float) -> None:
    # A banded C is used where columns share no row.
    apart = 400 if family == "banded" else 100
    falling = Workload(learning_rates=tuple(np.geomspace(1.0, last, 400).tolist()))
    constant, chosen = optimal(family, size, 400, apart), optimal(family, size, 400, apart, falling)
    assert left(chosen, falling, separation=apart) < 0.999 * left(constant, falling, separation=apart)
    assert left(constant, separation=apart) < 0.999 * left(chosen, separation=apart)
    # As many rates as there are steps, or fewer of them equally far apart.
    few = Workload(learning_rates=tuple(np.geomspace(1.0, last, 100).tolist()))
    assert error(chosen, 400, few) == pytest.approx(error(chosen, 400, falling), rel=0.02)


@pytest.mark.parametrize("separation", [100, 400])
def test_three_buffers_leave_less_than_eight_bands_and_than_a_square_root(separation: int) -> None:
    found = optimal("buffered", 3, 400, separation)
    assert len(found) == 3
    c = series(inverse_of(found), 400)
    assert (c > 0).all()
    assert (np.diff(c) < 0).all()
    root = of_inverse(square_root_of_inverse(400))
    assert left(found, separation=separation) < left(root, separation=separation)
    assert left(found, separation=separation) < left(optimal("inverse", 8, 400, separation), separation=separation)


@pytest.mark.parametrize("bands", [2, 4, 8])
def test_optimal_bands_of_c_leave_less_than_the_first_of_a_square_root(bands: int) -> None:
    found = optimal("banded", bands, 400, 400)
    assert np.abs(series(inverse_of(found), 400)[bands:]).max() < 1e-12
    root = inverse_of(of_inverse(square_root(bands)))
    assert left(found, separation=400) < left(root, separation=400) < left(of_inverse((1.0,)), separation=400)


def test_a_matrix_whose_inverse_grows_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="grows without bound"):
        sensitivity(of_inverse((1.0, -3.0)), 2000, separation=100)
