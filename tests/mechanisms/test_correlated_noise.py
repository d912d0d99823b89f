"""Correlated noise is C⁻¹z of the very z that independent steps would add, however it is drawn."""

from __future__ import annotations

import pytest
import torch

from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.mechanisms import buffered, inverse_of, of_inverse, series
from ghostclip.noise import ExactNoise
from ghostclip.noise.continuous import make_noise_source
from ghostclip.noise.keyed import Correlation, KeyedNoise, add_noise_

CORRELATION = Correlation(of_inverse((1.0, -0.5, 0.25)), scale=2.0)
BANDED = Correlation(inverse_of(of_inverse((1.0, 0.6, 0.3, 0.1))), scale=1.5)
BUFFERED = Correlation(buffered((0.95, 0.4), (0.7, 0.1)), scale=1.2)
MIXED = Correlation((((1.0, -0.5, 0.2), (1.0, -0.3)), ((1.0,), (1.0, 0.2, 0.1))), scale=0.7)
ALL = pytest.mark.parametrize(
    "correlation", [CORRELATION, BANDED, BUFFERED, MIXED], ids=["lags", "banded", "blt", "mixed"]
)
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


@ALL
@pytest.mark.parametrize("level", ["fast", "secure"])
def test_each_step_adds_the_noise_of_earlier_steps_again(level: str, correlation: Correlation) -> None:
    source, plain = copies(level)
    source.correlate(correlation, stride=STRIDE)
    found = steps_of(source, 7, 1.5)
    z = [independent(plain, step, 1.5) for step in range(7)]
    c = correlation.scale * series(correlation.sections, 7)
    for step, row in enumerate(found):
        for number, tensor in enumerate(row):
            wanted = sum(c[lag] * z[step - lag][number] for lag in range(step + 1))
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


@ALL
def test_steps_without_a_release_count(correlation: Correlation) -> None:
    source, plain = copies("fast")
    source.correlate(correlation, stride=STRIDE)
    steps_of(source, 2, 1.0)
    (row,) = steps_of(source, 1, 1.0, first=5)
    z = [independent(plain, step, 1.0) for step in range(6)]
    c = correlation.scale * series(correlation.sections, 6)
    for number, tensor in enumerate(row):
        wanted = sum(c[lag] * z[5 - lag][number] for lag in range(6))
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


@ALL
def test_shards_shares_and_threads_give_the_same_noise(correlation: Correlation) -> None:
    source, others = make_noise_source(), [make_noise_source() for _ in range(4)]
    for other in others:
        other.load_state_dict(source.state_dict())
    for one in (source, *others):
        one.correlate(correlation, stride=STRIDE)
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


@ALL
def test_a_saved_source_continues_to_the_bit(correlation: Correlation) -> None:
    source, other = copies("fast")
    source.correlate(correlation, stride=STRIDE)
    other.correlate(correlation, stride=STRIDE)
    whole = steps_of(source, 6, 1.0)
    steps_of(other, 3, 1.0)
    again = make_noise_source()
    again.correlate(correlation, stride=STRIDE)
    again.load_state_dict(other.state_dict())
    rest = steps_of(again, 3, 1.0, first=3)
    assert all(
        torch.equal(a, b) for one, two in zip(whole[3:], rest, strict=True) for a, b in zip(one, two, strict=True)
    )


@ALL
def test_a_fresh_key_begins_anew_and_takes_nothing_back(correlation: Correlation) -> None:
    source = make_noise_source()
    source.correlate(correlation, stride=STRIDE)
    steps_of(source, 3, 1.0)
    source.renew_key()
    plain = make_noise_source()
    plain.load_state_dict({name: value for name, value in source.state_dict().items() if name != "rows"})
    first, second = steps_of(source, 2, 1.0, first=3)
    z = [independent(plain, step, 1.0) for step in (3, 4)]
    for number in range(STRIDE):
        c = correlation.scale * series(correlation.sections, 2)
        torch.testing.assert_close(first[number], c[0] * z[0][number])
        torch.testing.assert_close(second[number], c[0] * z[1][number] + c[1] * z[0][number])


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
    buffers = make_noise_source()
    buffers.correlate(BUFFERED, stride=2)
    other.correlate(Correlation(of_inverse((1.0, -0.4)), scale=2.0), stride=2)
    for source, state in (
        (one, plain.state_dict()),
        (one, other.state_dict()),
        (plain, one.state_dict()),
        (buffers, one.state_dict()),
    ):
        with pytest.raises(ResumeError, match="mechanism of before"):
            source.load_state_dict(state)


def test_discrete_noise_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="noise_level='exact' with correlated noise"):
        ExactNoise().correlate(CORRELATION, stride=1)


@pytest.mark.parametrize("coefficients", [(), (2.0,), (1.0, float("nan"))])
def test_coefficients_that_are_none_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="coefficients="):
        Correlation(of_inverse(coefficients), scale=1.0)
