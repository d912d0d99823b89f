"""Scripts written for Opacus run with nothing but the import changed, and what is told of them is what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat.surface import outcomes
from tests.compat.surface.scripts import SCRIPTS, WHY

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "opacus-surface.json"
WRITTEN = {row["script"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["scripts"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_here(name):
    ours = outcomes.run(name, "ghostclip.compat.opacus")
    assert not ours.problem
    theirs = WRITTEN[name]["theirs"]
    if theirs is not None and name not in WHY:
        assert 0 < ours.shown["epsilon"] <= 1.01 * theirs


def test_every_script_is_in_the_committed_table():
    assert list(WRITTEN) == list(SCRIPTS)
    told = {name: row["status"] for name, row in WRITTEN.items() if row["status"] != "same"}
    assert set(told) == set(WHY)
    assert set(told.values()) <= {"differs", "runs here only"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_shows_what_it_shows_with_opacus(name):
    pytest.importorskip("opacus")
    (pair,) = outcomes.pairs([name])
    assert pair.status == WRITTEN[name]["status"], outcomes.plain([pair])[0]["remark"]
