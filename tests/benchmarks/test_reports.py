"""The programs from end to end on small models, and what their tables say of engines without figures."""

from __future__ import annotations

import json
import mmap
import platform
import subprocess
import sys

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import harness, memory
from benchmarks.__main__ import added
from benchmarks.harness import stem
from benchmarks.headline import fastest_peer, summary
from benchmarks.report import absent, markdown, memory_ratio
from benchmarks.tasks import find, tasks
from ghostclip._memory import PeakMemory

CPU = torch.device("cpu")
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


def test_a_process_that_dies_or_hangs_is_a_result(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended with 1" in harness.in_new_process("benchmarks.memory", [])["process_problem"]


def test_peaks_see_memory_that_is_let_go_again():
    class Runner:
        def step(self, batch):
            # Pages of their own: a tensor may lie where the heap has room that counts as held already.
            with mmap.mmap(-1, 2**25) as room:
                room[::4096] = bytes(2**13)

        def result(self):
            return []

    found = memory.peaks(Runner(), find("mlp", quick=True).batch(CPU), CPU)
    assert found["peak_bytes"] - found["loaded_bytes"] > 24 * 2**20
    assert found.get("steady_bytes", found["peak_bytes"]) - found["loaded_bytes"] > 24 * 2**20


def test_the_first_steps_are_not_counted_as_later_ones():
    class Runner:
        steps = 0

        def step(self, batch):
            self.steps += 1
            torch.ones((64 if self.steps == 1 else 1) * 2**20)

        def result(self):
            return []

    if not PeakMemory(CPU).starts_anew:
        pytest.skip("this system does not let a process forget its peak")
    found = memory.peaks(Runner(), find("mlp", quick=True).batch(CPU), CPU)
    assert found["peak_bytes"] - found["steady_bytes"] > 128 * 2**20


def _row(name, ratio, *, private=True, status="ok"):
    return {"name": name, "title": name, "private": private, "status": status, "wall_ratio": ratio, "problem": "p"}


def test_the_fastest_peer_is_right_and_not_ours():
    rows = [_row("nonprivate", 1.0, private=False), _row("bookkeeping", 1.1), _row("ghost", 0.9), _row("jax", 1.5)]
    rows += [_row("opacus-ghost", 0.5, status="wrong"), _row("torch-func", 1.4)]
    assert fastest_peer(rows)["name"] == "torch-func"
    assert fastest_peer(rows[:3]) is None


def test_memory_is_no_ratio_where_there_is_too_little_of_it():
    base = {"private": False, "loaded_bytes": 0, "peak_bytes": 2**24, "steady_bytes": 2**21}
    own = {"private": True, "loaded_bytes": 2**20, "peak_bytes": 2**24, "steady_bytes": 2**22}
    assert memory_ratio(own, [base, own]) == pytest.approx(1.5)
    assert memory_ratio(own, [{**base, "steady_bytes": 2**10}, own]) is None
    assert memory_ratio({"private": True}, [base]) is None


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


def test_tasks_have_the_same_names_in_both_sizes():
    assert [task.name for task in tasks(quick=True)] == [task.name for task in tasks(quick=False)]
    with pytest.raises(LookupError, match="'nobody'"):
        find("nobody", quick=True)


def test_quick_results_have_names_of_their_own():
    assert (stem("x", CPU, quick=True), stem("x", CPU, quick=False)) == ("x-cpu-quick", "x-cpu")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_memory_that_is_kept_costs_no_page_faults():
    program = """
import resource, torch
from benchmarks import harness
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(20_000_000); torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
given_back = faults()
harness.keep_heap()
for _ in range(4):
    faults()
print(given_back, faults(), harness.describe(torch.device("cpu"))["heap_is_kept"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    given_back, kept, said = done.stdout.split()
    assert int(given_back) > 10_000
    assert int(kept) < 100
    assert said == "True"


def test_rows_of_engines_join_a_report_that_is_there():
    def report(command, **tasks):
        return {
            "command": command,
            "machine": {"commit": "0123456789abcdef"},
            "tasks": [
                {"name": name, "engines": [{"name": engine, "run": command} for engine in engines]}
                for name, engines in tasks.items()
            ],
        }

    earlier = report("first", cnn=["nonprivate", "bookkeeping", "graph"], mlp=["nonprivate", "bookkeeping"])
    both = added(report("second", cnn=["nonprivate", "graph"]), earlier, ["graph"])
    found = {task["name"]: [(row["name"], row["run"]) for row in task["engines"]] for task in both["tasks"]}
    assert found == {
        "cnn": [("nonprivate", "first"), ("bookkeeping", "first"), ("graph", "second")],
        "mlp": [("nonprivate", "first"), ("bookkeeping", "first")],
    }
    assert both["command"] == "first; later: second at commit 0123456789"
