"""Every row of the table of compatibility comes out as it says."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from tests.integrations.table import Row, all_rows, outcome_of

# One of each order in which hosts may come: what is in their wrappings is found in a way of its own.
ALWAYS = {"accelerate_prepare_then_make_private_one_process", "Fabric_fabric_setup_then_make_private_one_process"}


def _parameters():
    for made in all_rows():
        marks = [pytest.mark.integration]
        marks += [pytest.mark.distributed] if made.ranks > 1 else []
        # Trainings of seconds each: a third of the exact rows is enough for every change, all are driven for the table.
        further = made.outcome == "exact" and zlib.crc32(made.name.encode()) % 3 > 0 and made.name not in ALWAYS
        marks += [pytest.mark.slow] if made.slow or further else []
        yield pytest.param(made, id=made.name, marks=marks)


@pytest.mark.parametrize("made", list(_parameters()))
# What host libraries warn of, and how they leave their files and processes, is theirs.
@pytest.mark.filterwarnings("ignore")
def test_a_row_is_as_it_says(made: Row, tmp_path: Path):
    found = outcome_of(made, tmp_path)
    if found.outcome == "skipped":
        pytest.skip(found.said)
    assert found.outcome == made.outcome, found.said


def test_no_two_rows_have_one_name():
    names = [made.name for made in all_rows()]
    assert len(set(names)) == len(names)
    assert set(names) >= ALWAYS
