"""Each table runs from end to end in seconds, and marks an engine that is wrong instead of timing it."""

from __future__ import annotations

import gc
import json
import os
import shlex
from dataclasses import replace

import pytest
import torch

from benchmarks.tasks import per_sample_losses
from paper_repro import __main__ as program
from paper_repro import capacity, measure, memory
from paper_repro.capacity import largest
from paper_repro.tables import LETTERS, load
from paper_repro.trainers import trainers

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


def test_what_the_trial_proved_is_not_proved_again():
    """On a CPU the trial's runner is timed: two short steps on trial, two to warm up, three rounds, a count."""
    table = load("E", "tiny")
    attached = []

    def remembered(engine):
        def attach(model, max_grad_norm):
            attached.append(engine.attach(model, max_grad_norm))
            return attached[-1]

        return replace(engine, attach=attach)

    engines = [remembered(engine) for engine in table.engines(False)[:2]]
    assert engines[1].name == "bookkeeping"
    table = replace(table, engines=lambda check: engines)
    verdicts = [{"name": engine.name, "private": engine.private, "status": "ok"} for engine in engines]
    case = table.cases[0]
    plan = measure.Plan(CPU, 3, 0.0, frozenset())
    assert measure.measure_case(table, case, verdicts, plan)["rounds"] == 3
    assert len(attached) == 2
    assert attached[1].proving_steps == 0
    assert len(attached[1].update_seconds) >= 4 + 3


@pytest.mark.parametrize(("name", "off", "status"), [
    ("bookkeeping", 1e-12, "ok"), ("bookkeeping", 1e-8, None),
    ("opacus-hooks", 1e-4, "ok"), ("opacus-hooks", 2e-3, None),
])  # fmt: skip
def test_float64_acquits_an_engine_whose_float32_rounds(monkeypatch, name, off, status):
    monkeypatch.setattr(measure, "error_of", lambda engine, task, device, expected: off)
    case = load("A", "tiny").cases[0]
    engine = next(engine for engine in trainers(sigma=0.0, keep=True) if engine.name == name)
    row = measure._rounding_only(engine, case.task, CPU, None)
    assert row.get("status") == status
    assert row["error_float64"] == off


def test_an_engine_that_raises_is_marked_with_its_reason():
    table = load("E", "tiny")

    def attach(model, max_grad_norm):
        raise NotImplementedError("no rule for this\nand more lines")

    broken = [table.engines(False)[0], replace(table.engines(False)[1], attach=attach)]
    table = replace(table, engines=lambda check: broken)
    row = measure.check(table, table.cases[0], _plan())[1]
    assert (row["status"], row["problem"]) == ("failed", "NotImplementedError: no rule for this")


@pytest.mark.parametrize("name", ["bookkeeping", "opacus-hooks", "opacus-ghost"])
def test_a_step_is_noised_and_freed(name):
    case = load("E", "tiny").cases[0]
    batch = case.task.batch(CPU)
    released = []
    for sigma in (0.01, 1.0):
        engine = next(engine for engine in trainers(sigma=sigma, keep=True) if engine.name == name)
        trainer = engine.attach(case.task.model(CPU), 1.0)
        trainer.step(batch)
        trainer.step(batch)
        released.append(torch.cat([gradient.flatten() for gradient in trainer.result()]).std().item())
        trainer.clear()
        assert all(parameter.grad is None for parameter in trainer.parameters)
    # Over 550,570 values whose clipped sum is at most 4 long the noise is all there is.
    assert released == pytest.approx([0.01, 1.0], rel=0.3)


def test_weights_stay_where_they_are():
    case = load("E", "tiny").cases[0]
    batch = case.task.batch(CPU)
    trainer = trainers(sigma=1.0)[1].attach(case.task.model(CPU), 1.0)
    before = per_sample_losses(trainer.model, batch).detach()
    trainer.step(batch)
    torch.testing.assert_close(per_sample_losses(trainer.model, batch).detach(), before)


@pytest.mark.parametrize("memory_is", ["unknown", "a line", "a step"])
@pytest.mark.parametrize("most_that_fits", [0, 1, 2, 3, 7, 8, 29, 70, 157, 1000])
def test_the_largest_batch_is_found(most_that_fits, memory_is):
    tried = []
    limit = 10 * most_that_fits + 7

    def fits(samples):
        tried.append(samples)
        used = {"unknown": 0, "a line": 5 + 10 * samples, "a step": 4 + samples // 64}[memory_is]
        return used if samples <= most_that_fits else None

    found = largest(fits, most=500, limit=limit)
    expected = min(most_that_fits, 500)
    assert found <= expected
    assert expected - found <= max(0, 0.03 * expected)
    assert max(tried) <= 500
    # Guesses that memory misleads are given up after a few.
    assert len(tried) <= {"unknown": 16, "a line": 7, "a step": 16 + capacity.GUESSES}[memory_is]


def test_each_search_has_a_process_of_its_own():
    assert capacity._fork(lambda: {"largest_batch": os.getpid()})["largest_batch"] != os.getpid()


def test_a_search_whose_process_dies_says_so():
    problem = capacity._fork(lambda: os._exit(1))["capacity_problem"]
    assert problem == "the process died, most likely for lack of memory"
