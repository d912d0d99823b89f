"""Each table runs from end to end in seconds, and marks an engine that is wrong instead of timing it."""

from __future__ import annotations

import gc
import json
import shlex
from dataclasses import replace

import pytest
import torch

from paper_repro import __main__ as program
from paper_repro import capacity, measure, memory
from paper_repro.tables import LETTERS, load

# What is enough to see each kind of engine at work.
SHORT = {
    "A": "--case mnist-cnn --engine bookkeeping --engine opacus-hooks",
    "B": "--case mha --engine hooks --engine opacus-gsm",
    "C": "--engine ghost --engine opacus-fast",
    "D": "--case gpt2 --engine bookkeeping --engine opacus-ghost",
    "E": "--case vgg11 --engine fast --engine opacus-ghost",
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _unfreeze():
    """The program tells the collector that what is loaded stays; here it does not."""
    yield
    gc.unfreeze()


@pytest.fixture
def _same_process(monkeypatch):
    """Stands in for `in_new_process`: a new process would spend its seconds on imports."""

    def here(module, arguments):
        if module.endswith("memory"):
            return {name: {"loaded_bytes": 0, "peak_bytes": 2**20} for name in arguments[5:]}
        if module.endswith("capacity"):
            found = {"largest_batch": 3, "largest_batch_is_limit": False, "examples_per_second_at_largest": 7.5}
            return dict.fromkeys(arguments[arguments.index("--engines") + 1 :], found)
        return {"megabytes": dict.fromkeys(("to device", "forward", "backward", "step"), 1.0)}

    for place in (memory, capacity, program.stages):
        monkeypatch.setattr(place, "in_new_process", here)


@pytest.mark.usefixtures("_same_process")
@pytest.mark.parametrize("letter", LETTERS)
def test_a_table_runs_from_end_to_end(letter, tmp_path):
    arguments = shlex.split(f"{letter} --tiny --steps 1 --minutes 0 {SHORT[letter]}")
    assert program.main([*arguments, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / f"table-{letter.lower()}-cpu-tiny.json").read_text(encoding="utf-8"))
    assert report["machine"]["commit"]
    assert report["machine"]["versions"]["torch"]
    timed = [row for case in report["cases"] for row in case["engines"] if row["status"] == "ok"]
    assert {row["title"].split()[0] for row in timed} >= {"PyTorch,", "ghostclip"}
    assert all(row["wall_seconds"] > 0 and row["cpu_seconds"] > 0 for row in timed)
    text = (tmp_path / f"table-{letter.lower()}-cpu-tiny.md").read_text(encoding="utf-8")
    assert all(case["title"] in text for case in report["cases"])
    assert "shows that everything runs, not how fast" in text
    assert ("## Published" in text) == (letter != "A")
    assert (tmp_path / f"table-{letter.lower()}-cpu-tiny.png").stat().st_size > 5_000


def _plan():
    return measure.Plan(CPU, 1, 0.0, frozenset({"bookkeeping"}))


def test_an_engine_that_is_wrong_is_not_timed(monkeypatch):
    """The engine's sum is doubled behind its back."""
    table = load("E", "tiny")
    engine = next(engine for engine in table.engines(True) if engine.name == "bookkeeping")

    def attach(model, max_grad_norm):
        trainer = engine.attach(model, max_grad_norm)
        honest = trainer.result
        trainer.result = lambda: [2 * gradient for gradient in honest()]
        return trainer

    wrong = [table.engines(True)[0], replace(engine, attach=attach)]
    plain = [engine for engine in table.engines(False) if engine.name in ("nonprivate", "bookkeeping")]
    table = replace(table, engines=lambda check: wrong if check else plain)
    verdicts = measure.check(table, table.cases[0], _plan())
    found = measure.measure_case(table, table.cases[0], verdicts, _plan())
    assert found["engines"][1]["status"] == "wrong"
    assert "wall_seconds" not in found["engines"][1]
    assert "wall_seconds" in found["engines"][0]
