"""The search for data that move a sum too far: it can be repeated, and its report says what it found."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch

from benchmarks import sensitivity as program
from benchmarks.sensitivity import excess, markdown
from tests.exactness.sensitivity.data import Setting, changed, sample_of
from tests.exactness.sensitivity.search import Cell, search_cell

CELL = Cell("linear, two calls", "float32", "bookkeeping")


def test_a_cell_can_be_repeated():
    first, second = (search_cell(CELL, 8, seed=3).plain() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert search_cell(CELL, 8, seed=4).plain()["worst"] != first["worst"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_samples_are_finite_and_changes_leave_the_given_batch_alone(dtype):
    setting = Setting({"x": (5, 3), "y": (5, 3), "w": (5, 2), "w1": (1, 4)}, ("ids",), 5, dtype)
    for seed in range(50):
        chance = Random(seed)
        batch = {name: values.unsqueeze(0) for name, values in sample_of(setting, chance).items()}
        kept = {name: values.clone() for name, values in batch.items()}
        after = changed(batch, setting, chance)
        assert {name: values.shape for name, values in after.items()} == {n: v.shape for n, v in batch.items()}
        assert all(values.isfinite().all() for values in (*batch.values(), *after.values()))
        assert all(torch.equal(batch[name], kept[name]) for name in batch)


def test_a_search_is_written(tmp_path, capsys):
    arguments = ["--only", "scale", "--dtype", "float64", "--strategy", "hooks", "--each", "2", "--processes", "1"]
    assert program.main([*arguments, "--out", str(tmp_path)]) == 0
    assert "scale of the whole, float64, hooks" in capsys.readouterr().out
    report = json.loads((tmp_path / "sensitivity.json").read_text())
    assert [row["evaluations"] for row in report["cells"]] == [2, 2]
    assert (tmp_path / "sensitivity.md").read_text() == markdown(report)


def test_a_move_above_the_bound_is_marked():
    assert excess(1 - 1e-6, 1 + 1e-5) == "-1.0e-06"
    assert excess(1.5, 1 + 1e-5) == "**+5.0e-01**"
    assert excess("inf", 1 + 1e-5) == "**inf**"
