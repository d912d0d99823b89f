"""Correlated noise is Σ_j c_j·z_{t-j} of the very noise that independent steps would add, however it is drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.noise import ExactNoise, FastNoise, SecureNoise, add_noise_
from ghostclip.noise.continuous import make_noise_source
from ghostclip.noise.correlated import Correlation
from ghostclip.noise.keyed import KeyedNoise

CORRELATION = Correlation((1.0, -0.5, 0.25), scale=2.0)
SHAPES = [(3,), (70_000,), (8, 5), ()]
STRIDE = len(SHAPES)


def copies(level: str) -> tuple[KeyedNoise, KeyedNoise]:
    one, other = make_noise_source(level=level), make_noise_source(level=level)
    other.load_state_dict(one.state_dict())
    return one, other


def independent(source: KeyedNoise, step: int, std: float) -> list[torch.Tensor]:
    """The noise of a step's positions, one tensor after another."""
    state = source.state_dict()
    source.load_state_dict({**state, "position": step * STRIDE})
    tensors = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    add_noise_(source, tensors, std)
    source.load_state_dict(state)
    return tensors


def steps_of(source: KeyedNoise, count: int, std: float, *, first: int = 0) -> list[list[torch.Tensor]]:
    rows = []
    for step in range(first, first + count):
        source.begin_row(step)
        tensors = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        add_noise_(source, tensors, std)
        rows.append(tensors)
    return rows


@pytest.mark.parametrize("level", ["fast", "secure"])
def test_each_step_adds_the_noise_of_earlier_steps_again(level: str) -> None:
    source, plain = copies(level)
    source.correlate(CORRELATION, stride=STRIDE)
    found = steps_of(source, 5, 1.5)
    z = [independent(plain, step, 1.5) for step in range(5)]
    for step, row in enumerate(found):
        for number, tensor in enumerate(row):
            lags = list(enumerate(CORRELATION.coefficients))[: step + 1]
            wanted = sum(2.0 * c * z[step - lag][number] for lag, c in lags)
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [FastNoise, SecureNoise])
def test_covariance_over_steps_is_that_of_the_matrix(make: Callable[[], KeyedNoise]) -> None:
    source = make()
    source.correlate(CORRELATION, stride=1)
    rows = []
    for step in range(6):
        source.begin_row(step)
        tensor = torch.zeros(200_000)
        add_noise_(source, [tensor], 0.5)
        rows.append(tensor.double().numpy())
    matrix = np.zeros((6, 6))
    for lag, c in enumerate(CORRELATION.coefficients):
        matrix += np.diag(np.full(6 - lag, c), -lag)
    assert np.allclose(np.cov(np.stack(rows)), matrix @ matrix.T, atol=0.02)


def test_shards_shares_and_threads_give_the_same_noise() -> None:
    source, others = make_noise_source(), [make_noise_source() for _ in range(4)]
    for other in others:
        other.load_state_dict(source.state_dict())
    for one in (source, *others):
        one.correlate(CORRELATION, stride=STRIDE)
    for step in range(3):
        for one in (source, *others):
            one.begin_row(step)
        whole = torch.zeros(150_000)
        source.add_(whole, 1.0)
        parts = torch.zeros(150_000)
        for begin, end in ((0, 40_001), (40_001, 150_000)):
            # Each of two ranks is at the same place.
            others[0]._position = step * STRIDE
            others[0].add_shard_(parts[begin:end], 1.0, offset=begin, total=150_000)
        assert torch.equal(parts, whole)
        shares = torch.zeros(150_000)
        for rank in range(2):
            others[1 + rank].add_share_([shares], 1.0, rank=rank, ranks=2)
        assert torch.equal(shares, whole)
        divided = torch.zeros(150_000)
        others[3].release_all_([divided], 1.0, 4.0)
        assert torch.equal(divided, whole / 4)


def test_a_saved_source_continues_to_the_bit() -> None:
    source, other = copies("fast")
    source.correlate(CORRELATION, stride=STRIDE)
    other.correlate(CORRELATION, stride=STRIDE)
    whole = steps_of(source, 6, 1.0)
    steps_of(other, 3, 1.0)
    again = make_noise_source()
    again.correlate(CORRELATION, stride=STRIDE)
    again.load_state_dict(other.state_dict())
    rest = steps_of(again, 3, 1.0, first=3)
    assert all(
        torch.equal(a, b) for one, two in zip(whole[3:], rest, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_a_fresh_key_begins_anew_and_takes_nothing_back() -> None:
    source = make_noise_source()
    source.correlate(CORRELATION, stride=STRIDE)
    steps_of(source, 3, 1.0)
    source.renew_key()
    plain = make_noise_source()
    plain.load_state_dict({name: value for name, value in source.state_dict().items() if name != "rows"})
    first, second = steps_of(source, 2, 1.0, first=3)
    z = [independent(plain, step, 1.0) for step in (3, 4)]
    for number in range(STRIDE):
        torch.testing.assert_close(first[number], 2 * z[0][number])
        torch.testing.assert_close(second[number], 2 * (z[1][number] - 0.5 * z[0][number]))


def test_what_would_reuse_noise_is_refused() -> None:
    source = make_noise_source()
    source.correlate(CORRELATION, stride=2)
    source.begin_row(4)
    with pytest.raises(InvalidOptionError, match="noise of step 4 was drawn already"):
        source.begin_row(4)
    with pytest.raises(InvalidOptionError, match="the latest is step 4"):
        source.begin_row(3)
    source.begin_row(6)
    source.add_(torch.zeros(2), 1.0)
    source.add_(torch.zeros(2), 1.0)
    with pytest.raises(InvalidOptionError, match="more than 2 tensors of one step"):
        source.add_(torch.zeros(2), 1.0)


def test_other_tensors_than_before_are_refused_unless_the_key_is_fresh() -> None:
    source = make_noise_source()
    source.correlate(CORRELATION, stride=2)
    source.begin_row(0)
    source.add_(torch.zeros(7), 1.0)
    saved = source.state_dict()
    again = make_noise_source()
    again.correlate(CORRELATION, stride=2)
    again.load_state_dict(saved)
    for one in (source, again):
        one.begin_row(1)
        with pytest.raises(
            InvalidOptionError, match="8 elements on cpu, where earlier ones have added it to 7 elements"
        ):
            one.add_(torch.zeros(8), 1.0)
    again.renew_key()
    again.begin_row(2)
    again.add_(torch.zeros(8), 1.0)


def test_noise_of_another_kind_is_not_continued() -> None:
    one, other, plain = make_noise_source(), make_noise_source(), make_noise_source()
    one.correlate(CORRELATION, stride=2)
    other.correlate(Correlation((1.0, -0.4), scale=2.0), stride=2)
    for source, state in ((one, plain.state_dict()), (one, other.state_dict()), (plain, one.state_dict())):
        with pytest.raises(ResumeError, match="mechanism of before"):
            source.load_state_dict(state)


def test_discrete_noise_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="noise_level='exact' with correlated noise"):
        ExactNoise().correlate(CORRELATION, stride=1)


@pytest.mark.parametrize("coefficients", [(), (2.0,), (1.0, float("nan"))])
def test_coefficients_that_are_none_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="coefficients="):
        Correlation(coefficients, scale=1.0)
