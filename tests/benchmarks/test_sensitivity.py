"""The search for data that move a sum too far: it can be repeated, and its report says what it found."""

from __future__ import annotations

import json

from benchmarks import sensitivity as program
from benchmarks.sensitivity import markdown


def test_a_search_is_written(tmp_path, capsys):
    arguments = ["--only", "scale", "--dtype", "float64", "--strategy", "hooks", "--each", "2", "--processes", "1"]
    assert program.main([*arguments, "--out", str(tmp_path)]) == 0
    assert "scale of the whole, float64, hooks" in capsys.readouterr().out
    report = json.loads((tmp_path / "sensitivity.json").read_text())
    assert [row["evaluations"] for row in report["cells"]] == [2, 2]
    assert (tmp_path / "sensitivity.md").read_text() == markdown(report)
