"""The one command for a GPU: its pieces on a CPU, what it does when something is wrong, slow or too large."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import agreement, graph, large, one_step, products, rows, stages, twins
from benchmarks.gpu.stages import Job, Stage
from ghostclip.graph import GraphOptions

CPU = torch.device("cpu")


@pytest.fixture
def written(tmp_path):
    """Run a stage's module in this process; give its rows by case."""

    def run(module, *arguments):
        place = tmp_path / "rows"
        assert module.main(["--device", "cpu", "--quick", "--rows", str(place), *arguments]) == 0
        return {row["case"]: row for row in rows.read(place)}

    yield run
    torch.set_float32_matmul_precision("highest")


def run_stages(monkeypatch, folder, *found, arguments=()):
    monkeypatch.setattr(gpu, "stages", lambda device, *, quick: list(found))
    code = gpu.main(["--device", "cpu", "--quick", "--out", str(folder), *arguments])
    return code, json.loads((folder / "gpu-cpu-quick.json").read_text(encoding="utf-8"))


def python(code, *, seconds=60.0, name="job", **options):
    return Job(name, ("-c", code), seconds, **options)


def writes(*found):
    """A program that appends rows to the file that is its last argument."""
    lines = "".join(json.dumps(row) + "\\n" for row in found)
    return f"import sys; open(sys.argv[-1], 'a').write('''{lines}''')"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Inductor calls what torch has deprecated
@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_agreement_is_looked_at_strategy_by_strategy(written, monkeypatch, backend):
    if backend == "aten":
        # Three graphs take Inductor a minute; they are rewritten and compared all the same.
        monkeypatch.setattr(GraphOptions, "compiled", lambda self, graph, inputs: graph)
    found = written(agreement)
    assert {row["status"] for row in found.values()} == {"ok"}
    assert list(found)[:3] == [f"{name}, bookkeeping" for name in ("gpt", "gpt2-large-small", "llama-1b-small")]
    assert sum("at most C" in name for name in found) == 24


def test_a_default_path_that_is_wrong_ends_the_run(tmp_path, monkeypatch):
    wrong = python(writes({"case": "gpt, bookkeeping", "status": "wrong", "error": 0.5}))
    code, report = run_stages(
        monkeypatch,
        tmp_path,
        Stage("agreement", "Right?", (wrong,), 1.0, "bookkeeping"),
        Stage("products", "Never", (python("1/0"),), 1.0),
    )
    assert code == gpu.WRONG == 2
    assert [stage["name"] for stage in report["stages"]] == ["agreement"]
    assert "Stopped after agreement" in (tmp_path / "gpu-cpu-quick.md").read_text(encoding="utf-8")


def test_a_job_that_fails_or_hangs_keeps_nobody_from_running(tmp_path, monkeypatch):
    hangs = writes({"case": "first", "status": "ok"}) + "; import time; time.sleep(60)"
    jobs = python(hangs, seconds=3.0, name="hangs"), python("1/0", name="fails"), python(writes(), name="good")
    code, report = run_stages(monkeypatch, tmp_path, Stage("rest", "All", jobs, 1.0))
    found = [(row["case"], row["status"]) for row in report["stages"][0]["rows"]]
    assert found == [("first", "ok"), ("hangs", "cut short"), ("fails", "failed")]
    assert "ZeroDivisionError" in report["stages"][0]["rows"][2]["problem"]
    assert code == 1
    assert not list(tmp_path.glob("*.rows"))


def test_stages_fit_the_commands_they_start(monkeypatch):
    modules = {"agreement": agreement, "products": products, "twins": twins, "large": large, "one_step": one_step}
    modules["graph"] = graph
    seen = []
    for name, module in modules.items():
        monkeypatch.setattr(module, "started", lambda *own, given, name=name: seen.append((name, own, given)) or 1 / 0)
    for device in (CPU, torch.device("cuda")):
        for stage in stages.stages(device, quick=True):
            for job in (job for job in stage.jobs if job.writes_rows):
                name = job.arguments[1].rpartition(".")[2]
                with pytest.raises(ZeroDivisionError):
                    modules[name].main(list(job.arguments[2:]))
                rows.started(*seen[-1][1], given=seen[-1][2])
    assert {name for name, _, _ in seen} == set(modules)


@pytest.mark.slow
def test_the_rehearsal_runs_every_stage(tmp_path):
    assert gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-cpu-quick.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in report["stages"]] == [stage.name for stage in stages.stages(CPU, quick=True)]
    found = [row for stage in report["stages"] for row in stage["rows"]]
    assert {row["status"] for row in found} <= {"ok", "cannot"}
