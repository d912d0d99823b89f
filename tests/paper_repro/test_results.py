"""The committed tables are whole runs on a commit that is named, in which every strategy was right."""

import json

import pytest

from benchmarks.engines import STRATEGIES
from paper_repro.__main__ import RESULTS


@pytest.mark.parametrize("path", sorted(RESULTS.glob("table-[a-e]-*.json")), ids=lambda path: path.stem)
def test_committed_tables_are_whole(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["size"] != "tiny"
    assert report["machine"]["commit"]
    assert not report["machine"]["changed_since_commit"]
    assert "--" not in report["command"].replace("--device", ""), "a part of a table, or a shortened one"
    rows = [row for case in report["cases"] for row in case["engines"] if row["name"] in STRATEGIES]
    assert rows
    assert all(row["status"] == "ok" for row in rows)


def test_every_table_is_committed():
    assert {path.name[:7] for path in RESULTS.glob("table-*-cpu.json")} == {f"table-{letter}" for letter in "abcdef"}
