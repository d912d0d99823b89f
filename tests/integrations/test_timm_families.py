"""Every family of timm's models is exact once its batch norms are replaced; the table is benchmarks/results/timm.md."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from benchmarks.harness import RESULTS
from tests.integrations.rows_timm import require_exact
from tests.integrations.timm_families import FAMILIES


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in FAMILIES])
def test_a_family_is_exact_once_fixed(family):
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    require_exact(family)


def test_the_table_is_of_these_families():
    rows = json.loads((RESULTS / "timm.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["family"], row["model"]) for row in rows] == [(family.name, family.model) for family in FAMILIES]
    assert len(rows) >= 40
    assert {row["outcome"] for row in rows} == {"exact"}
