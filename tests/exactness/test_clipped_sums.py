"""Every case and strategy against one sample at a time: sums, norms, coefficients, sensitivity."""

import zlib

import pytest
import torch

from ghostclip.errors import GhostClipError
from tests.cases import ALL_CASES
from tests.exactness.runs import STRATEGIES, check_norms, check_sensitivity, check_sum, engine, expected, run


def _strategies(test, case):
    """All, the one first that is run on every device."""
    first = zlib.crc32(f"{test} {case.name}".encode())
    return [STRATEGIES[(first + further) % 4] for further in range(4)]


_RUNS = [
    pytest.param(case, dtype, strategy, id=f"{strategy}-{case.name}-{str(dtype)[6:]}")
    for case in ALL_CASES
    for dtype in case.dtypes
    for strategy in _strategies("test_matches_one_sample_autograd", case)[: 4 if dtype == case.dtypes[0] else 1]
]
# Masks drawn for another batch size are other masks, so that leaving a sample out changes the others' gradients.
_REPEATABLE = [
    pytest.param(case, strategy, id=f"{strategy}-{case.name}")
    for case in ALL_CASES
    if "random" not in case.tags
    for strategy in _strategies("test_one_sample_moves_the_sum_by_at_most_the_bound", case)[:2]
]


def _unless_refused(case, check):
    """Run the check; where the table says that the case is refused, it must be, by name."""
    if case.refused:
        with pytest.raises(GhostClipError, match=case.refused):
            check()
        return
    check()


@pytest.mark.parametrize(("case", "dtype", "strategy"), _RUNS)
def test_matches_one_sample_autograd(case, dtype, strategy, device):
    def check():
        there = case.on(device)
        outcome = run(there, engine(strategy, batch_first=case.batch_first), dtype)
        reference = expected(case.name, device, there.reference_dtype(dtype))
        check_sum(outcome, reference, dtype)
        check_norms(outcome, reference, dtype)

    _unless_refused(case, check)


@pytest.mark.parametrize(("case", "strategy"), _REPEATABLE)
def test_one_sample_moves_the_sum_by_at_most_the_bound(case, strategy, device):
    """Held in float32, where rounding could break it."""
    make = engine(strategy, batch_first=case.batch_first)
    _unless_refused(case, lambda: check_sensitivity(case.on(device), make, torch.float32, samples=2))
