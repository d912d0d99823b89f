"""What the benchmarks stand on: the model's cost, and a README whose figures come from a committed run."""

from __future__ import annotations

import json

import pytest

from benchmarks import readme
from benchmarks.engines import STRATEGIES
from benchmarks.tasks import tasks

NAMES = [task.name for task in tasks(quick=False)]


def test_every_strategy_is_compared():
    from benchmarks.engines import engines

    names = {engine.name for engine in engines()}
    assert names >= {"nonprivate", *STRATEGIES}


@pytest.mark.parametrize("page", readme.PAGES)
def test_pages_show_the_committed_results(page):
    text = (readme.ROOT / page).read_text(encoding="utf-8")
    assert readme.rewritten(page, text) == text, "run `python -m benchmarks.readme`"


def test_committed_results_are_whole():
    for path in readme.RESULTS.glob("report-*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        assert not report["quick"], f"{path.name}: a quick run says nothing about speed"
        assert report["machine"]["commit"], f"{path.name} names no commit"
        assert {"gpt"} <= {task["name"] for task in report["tasks"]} <= set(NAMES)
        ours = [row for task in report["tasks"] for row in task["engines"] if row["name"] in STRATEGIES]
        assert ours
        assert all(row["status"] == "ok" for row in ours)
