"""The programs from end to end on small models, and what their tables say of engines without figures."""

from __future__ import annotations

import json

import pytest

from benchmarks import __main__ as program
from benchmarks import memory
from benchmarks.headline import summary
from benchmarks.integrations.__main__ import joined
from benchmarks.report import absent, markdown

PEAKS = {"loaded_bytes": 0, "peak_bytes": 3 * 2**20, "steady_bytes": 2**21}


@pytest.fixture
def _same_process(monkeypatch):
    """Stands in for processes of their own, which would spend their seconds on imports."""

    def here(module, arguments, *, seconds=None):
        assert module == "benchmarks.memory"
        return dict(PEAKS)

    monkeypatch.setattr(memory, "in_new_process", here)


@pytest.mark.usefixtures("_same_process")
def test_the_report_runs_from_end_to_end(tmp_path):
    arguments = ["--quick", "--task", "mlp", "--engine", "bookkeeping", "--engine", "torch-func", "--seconds", "0.001"]
    assert program.main([*arguments, "--rounds", "1", "--with-memory", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report-cpu-quick.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in report["tasks"][0]["engines"]] == ["nonprivate", "bookkeeping", "torch-func"]
    assert all(row["status"] == "ok" and row["flops"] > 0 for row in report["tasks"][0]["engines"])
    text = (tmp_path / "report-cpu-quick.md").read_text(encoding="utf-8")
    assert "| 1.00× | 3 |" in text, "memory of later steps as a ratio, then of the first in MB"
    assert "fastDP" in text
    assert (tmp_path / "report-cpu-quick.png").stat().st_size > 5_000
    assert "torch.func vmap" in summary(report)


def _row(name, ratio, *, private=True, status="ok"):
    return {"name": name, "title": name, "private": private, "status": status, "wall_ratio": ratio, "problem": "p"}


def test_an_engine_that_cannot_says_why_and_shows_no_figure():
    machine = {"cpu": "a", "cores": 1, "threads": 1, "memory_gib": 1, "os": "b", "python": "3", "versions": {}}
    machine |= {"commit": "c" * 40, "changed_since_commit": False}
    task = {"title": "T", "parameters": 1, "max_grad_norm": 1.0, "rounds": 1}
    task["engines"] = [{**_row("jax", 1.234, status="cannot"), "problem": "not written"}]
    report = {"command": "c", "date": "d", "quick": False, "machine": machine, "tasks": [task]}
    report["missing"] = [{"title": "BackPACK", "install": "pip install it"}]
    text = markdown(report)
    assert "cannot: not written" in text
    assert "1.23" not in text
    assert "Not installed: BackPACK (`pip install it`)" in absent(report)


def test_rows_that_are_driven_again_replace_those_of_an_earlier_report():
    earlier = {"command": "all", "rows": [{"tool": "t", "feature": name, "found": "refused"} for name in ("a", "b")]}
    later = {"command": "some", "date": "d", "machine": {"commit": "c" * 40}}
    later["rows"] = [{"tool": "t", "feature": name, "found": "exact"} for name in ("b", "new")]
    report = joined(earlier, later, [("t", "b"), ("t", "new"), ("t", "not driven")])
    assert report["rows"] == later["rows"], "a is no row of the table any more"
    assert report["command"] == "all; later: some, d, at commit cccccccccc"
