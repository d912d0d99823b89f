"""An engine that fails, dies or is too slow shows as such and keeps nobody from being measured; options are checked."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as report
from benchmarks import harness, memory, run, timing
from benchmarks.engines import NON_PRIVATE, CannotDo, Engine
from benchmarks.gpu import __main__ as gpu
from benchmarks.tasks import find

CPU = torch.device("cpu")
MLP = find("mlp", quick=True)
PEAKS = {"loaded_bytes": 0, "peak_bytes": 3 * 2**20, "steady_bytes": 2**21}


class _Fails:
    """Right on few samples, as a step on many is what it does not get through."""

    most = 2

    def __init__(self, model, max_grad_norm):
        self.inner = NON_PRIVATE.attach(model, max_grad_norm)

    def step(self, batch):
        if len(batch[1]) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.inner.step(batch)

    def result(self):
        return self.inner.result()


class _Refuses:
    def __init__(self, model, max_grad_norm):
        raise CannotDo("not for such a model")


FAILS = Engine("fails", "Fails", True, _Fails)


@pytest.fixture
def _right(monkeypatch):
    """Every engine counts as right, so that what comes after the check is what is seen."""
    monkeypatch.setattr(run, "error_of", lambda engine, task, device, expected: 0.0)


@pytest.mark.usefixtures("_right")
def test_an_engine_that_fails_on_the_whole_batch_is_not_timed():
    found = run.measure_task(MLP, [NON_PRIVATE, FAILS], CPU, run.Limits(1, 0.0, False), quick=True)
    good, bad = found["engines"]
    assert (good["status"], bad["status"]) == ("ok", "failed")
    assert "can't allocate memory" in bad["problem"]
    assert "wall_ratio" in good
    assert "wall_ratio" not in bad


@pytest.mark.usefixtures("_right")
def test_without_the_non_private_engine_there_are_no_ratios():
    base = Engine("nonprivate", "PyTorch", False, _Fails)
    found = run.measure_task(
        MLP, [base, replace(NON_PRIVATE, private=True)], CPU, run.Limits(1, 0.0, False), quick=True
    )
    assert [row["status"] for row in found["engines"]] == ["failed", "failed"]
    assert found["rounds"] == 0
    assert "nothing to compare with" in found["engines"][1]["problem"]


@pytest.mark.parametrize(
    ("alone", "status", "why"),
    [
        ({"process_problem": "not done after 25 s"}, "failed", "not done after 25 s"),
        ({"cannot": "no rule"}, "cannot", "no rule"),
    ],
)
def test_what_dies_alone_is_not_let_into_the_process_that_reports(monkeypatch, alone, status, why):
    seen = []

    def measure(task_name, engine_name, device, *, quick, seconds):
        seen.append((engine_name, seconds))
        return dict(PEAKS) if engine_name == "nonprivate" else dict(alone)

    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr(_Fails, "__init__", lambda *_: pytest.fail("attached"))
    limits = run.Limits(1, 0.0, with_memory=True, alone_seconds=25.0)
    found = run.measure_task(MLP, [NON_PRIVATE, FAILS], CPU, limits, quick=True)
    assert (found["engines"][1]["status"], found["engines"][1]["problem"]) == (status, why)
    assert seen == [("nonprivate", 25.0), ("fails", 25.0)]


def test_a_process_says_what_cannot_be_and_what_killed_it(monkeypatch, capsys):
    monkeypatch.setattr(memory, "every_engine", lambda: [Engine("x", "X", True, _Refuses)])
    monkeypatch.setattr(memory, "give_way", lambda: None)
    monkeypatch.setattr("sys.argv", ["memory", "mlp", "x", "--quick"])
    memory.main()
    assert json.loads(capsys.readouterr().out) == {"cannot": "not for such a model"}
    code = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(harness.subprocess, "run", _as_if(harness.subprocess.run, code))
    assert "lack of memory" in harness.in_new_process("benchmarks.memory", [])["process_problem"]


def _as_if(real, code):
    return lambda command, **options_: real([command[0], "-SEc", code], **options_)


def test_memory_that_runs_out_is_told_from_other_errors():
    told = [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("RESOURCE_EXHAUSTED: x")]
    assert all(harness.short_of_memory(problem) for problem in told)
    assert not harness.short_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "nobody"], "argument --engine: unknown: nobody (there are: nonprivate"),
        (["--device", "nowhere"], "argument --device: 'nowhere' is no device"),
        (["--device", "cuda:77"], "so there is no cuda:77"),
        (["--seconds", "-1"], "argument --seconds: '-1' is no number above zero"),
        (["--seconds", "x"], "argument --seconds: 'x' is no number above zero"),
        (["--out", "/dev/null/here"], "argument --out: cannot make the folder /dev/null/here: Not a directory"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_counts_and_names_of_tasks_are_checked_as_well(capsys):
    with pytest.raises(SystemExit):
        report.main(["--rounds", "0"])
    with pytest.raises(SystemExit):
        report.main(["--task", "nothing"])
    said = capsys.readouterr().err
    assert "'0' is no whole number above zero" in said
    assert "argument --task: unknown: nothing (there are: gpt" in said
    assert harness.count("3") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "add --quick"),
        (["--device", "nowhere", "--quick"], "argument --device: 'nowhere' is no device"),
        (["--device", "cpu", "--quick", "--minutes", "0"], "argument --minutes: '0' is no number above zero"),
    ],
)
def test_the_command_for_a_gpu_says_in_one_line_what_is_wrong(arguments, said, capsys):
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_every_engine_runs_once_a_round_after_changing_neighbours():
    """An engine that leaves threads spinning must not always hit the same one."""
    ran = []

    class Runner:
        def __init__(self, name):
            self.name = name

        def step(self, batch):
            ran.append(self.name)

    names = "abcd"
    found = timing.measure([Runner(name) for name in names], (), torch.device("cpu"), rounds=40, seconds=60)
    assert all(len(times.wall) == len(times.cpu) == 40 for times in found)
    turns = [name for name, _ in itertools.groupby(ran[-40 * 4 * timing.MOST_IN_A_TURN :])]
    after_a = {second for first, second in itertools.pairwise(turns) if first == "a"}
    assert after_a == set("bcd")
