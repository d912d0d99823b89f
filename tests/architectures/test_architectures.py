"""Every known architecture is clipped exactly, one sample moving the sum by at most C, or refused by name."""

import logging

import pytest
import torch

from ghostclip.errors import GhostClipError
from tests.architectures.known import ALL, first_of_families, quick
from tests.architectures.measure import measure, none, reference
from tests.exactness import tolerances
from tests.exactness.runs import STRATEGIES

_QUICK = quick()
_FIRST = first_of_families()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Nothing is looked up, and nothing is said about it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _runs():
    for row in ALL:
        for strategy in STRATEGIES:
            fast = row.name in (_FIRST if strategy != "bookkeeping" else _QUICK)
            marks = () if fast else (pytest.mark.slow,)
            yield pytest.param(row, strategy, id=f"{row.name}-{strategy}", marks=marks)


@pytest.mark.parametrize(("row", "strategy"), list(_runs()))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_clipped_exactly_or_refused(row, strategy):
    if row.case.refused:
        with pytest.raises(GhostClipError, match=row.case.refused):
            measure(row.case, strategy, none())
        return
    done = measure(row.case, strategy, reference(row.case))
    assert done.error <= tolerances.RELATIVE[torch.float64]
    assert done.norm_error <= tolerances.RELATIVE[torch.float64]
    assert done.moved <= 1 + tolerances.SENSITIVITY[torch.float64]


def test_the_table_spans_the_families():
    assert len(ALL) >= 90
    assert len(_QUICK) >= 40
    assert all(bool(row.case.refused) == bool(row.reason) for row in ALL)
