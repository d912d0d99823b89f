"""A step on a GPU is counted without one: launches, host reads, memory and predicted time of small models."""

from dataclasses import replace

import pytest

from benchmarks.gpu.counted import ENGINES, count, main
from benchmarks.gpu.models import large_models
from ghostclip.clipping import alike

pytest.importorskip("transformers")
CASES = [replace(case, task=case.quick) for case in large_models()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_counted(case, monkeypatch):
    # These layers stand for large ones, of which none is put together with another.
    monkeypatch.setattr(alike, "_SMALL_ON_A_GPU", 0)
    found = {engine: count(case, engine, samples=3) for engine in ENGINES}
    base = found["ordinary"]
    for engine, row in found.items():
        assert row.kernels.total() >= base.kernels.total()
        assert row.seconds["products of 16 bits"] >= base.seconds["products of 16 bits"] > 0
        assert row.peak > sum(parameter.nbytes for parameter in case.task.make_model().parameters())
        assert row.kernels["bmm"] > 0 or engine == "ordinary"
    # The one question whether all norms are certain.
    assert found["bookkeeping"].reads <= base.reads + 1


def test_the_report_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.gpu.counted.large_models", lambda: CASES[:1])
    main(["--out", str(tmp_path), "--samples", "2"])
    assert "bookkeeping" in capsys.readouterr().out
    text = (tmp_path / "gpu-counted.md").read_text(encoding="utf-8")
    assert "no GPU took part" in text
    assert (tmp_path / "gpu-counted.json").exists()
