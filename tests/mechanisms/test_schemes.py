"""What schemes of rounds and epochs draw."""

from __future__ import annotations

import numpy as np
import pytest

from ghostclip.data import Cyclic, CyclicPoisson, RandomAllocation
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keys import RandomKey


def epoch_of(scheme: RandomAllocation | Cyclic, key: RandomKey, epoch: int) -> list[np.ndarray]:
    return [scheme.draw(key, epoch * scheme.steps + step) for step in range(scheme.steps)]


@pytest.mark.parametrize(
    "scheme", [RandomAllocation(num_samples=101, epoch_steps=7), Cyclic(num_samples=101, epoch_steps=7)]
)
def test_each_record_is_in_exactly_one_batch_of_an_epoch(scheme: RandomAllocation | Cyclic) -> None:
    key = RandomKey("sampling")
    for epoch in (0, 3):
        assert sorted(np.concatenate(epoch_of(scheme, key, epoch))) == list(range(101))
    again = [batch.tolist() for batch in epoch_of(scheme, key, 3)]
    assert again == [batch.tolist() for batch in epoch_of(scheme, key, 3)]


def test_allocation_is_uniform_and_drawn_anew_for_each_epoch_and_record() -> None:
    scheme, key = RandomAllocation(num_samples=2000, epoch_steps=5), RandomKey("sampling")
    steps = np.zeros((6, 2000), int)
    for epoch in range(6):
        for step, batch in enumerate(epoch_of(scheme, key, epoch)):
            steps[epoch, batch] = step
    counts = np.array([np.bincount(row, minlength=5) for row in steps])
    # A multinomial count of mean 400 has deviation 18.
    assert (np.abs(counts - 400) < 100).all()
    same = (steps[0] == steps[1]).mean()
    assert abs(same - 0.2) < 0.06
    assert abs((steps[:, :-1] == steps[:, 1:]).mean() - 0.2) < 0.03


def test_k_of_all_steps_are_any_k_of_them_equally_often() -> None:
    scheme, key = RandomAllocation(num_samples=6000, epoch_steps=3, rounds=2), RandomKey("sampling")
    for event in (0, 5):
        batches = [scheme.draw(key, 6 * event + step) for step in range(6)]
        assert all((np.diff(batch) > 0).all() for batch in batches)
        there = np.zeros((6000, 6), int)
        for step, batch in enumerate(batches):
            there[batch, step] += 1
        assert (there.sum(1) == 2).all()
        pairs = np.array([(there[:, one] & there[:, two]).sum() for one in range(6) for two in range(one)])
        # 15 subsets; the 0.9999 quantile of chi-squared with 14 degrees is 44.
        assert ((pairs - 400) ** 2 / 400).sum() < 44
    assert scheme.event.participations == 2
    assert scheme.event.steps_per_event == 6


def test_groups_of_cyclic_poisson_samples_are_those_of_the_account() -> None:
    scheme, key = CyclicPoisson(num_samples=1000, groups=4, sample_rate=0.5, epoch_steps=8), RandomKey("sampling")
    group_of = {}
    for position in range(160):
        for record in scheme.draw(key, position):
            assert group_of.setdefault(int(record), position % 4) == position % 4
    assert len(group_of) == 1000
    sizes = [len(scheme.draw(key, position)) for position in range(200)]
    assert abs(np.mean(sizes) - scheme.expected_batch_size) < 5


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RandomAllocation(num_samples=3, epoch_steps=4), "only 3 records"),
        (lambda: RandomAllocation(num_samples=9, epoch_steps=3, rounds=0), "rounds=0"),
        (lambda: Cyclic(num_samples=3, epoch_steps=0), "epoch_steps=0"),
        (lambda: CyclicPoisson(num_samples=9, groups=2, sample_rate=0.5, epoch_steps=3), "no multiple of groups=2"),
        (lambda: CyclicPoisson(num_samples=9, groups=2, sample_rate=1.5, epoch_steps=4), "sample_rate=1.5"),
    ],
)
def test_what_is_out_of_range_is_refused(make: object, match: str) -> None:
    with pytest.raises(InvalidOptionError, match=match):
        make()  # type: ignore[operator]
