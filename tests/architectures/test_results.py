"""The committed comparison: whole, from a named commit, and with nothing wrong in it."""

import json

import pytest
import torch

from benchmarks.architectures.report import markdown
from benchmarks.harness import RESULTS
from tests.exactness import tolerances

FILE = RESULTS / "architectures.json"


@pytest.fixture(scope="module")
def report():
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_every_row_is_exact_or_refused(report):
    assert report["machine"]["commit"]
    assert len(report["rows"]) >= 90
    for row in report["rows"]:
        if "refused" in row:
            assert row["reason"], row["name"]
            continue
        assert row["error"] <= tolerances.RELATIVE[torch.float64], row["name"]
        assert row["moved"] <= 1 + tolerances.SENSITIVITY[torch.float64], row["name"]


def test_the_table_for_people_is_of_the_same_run(report):
    assert FILE.with_suffix(".md").read_text(encoding="utf-8") == markdown(report)
