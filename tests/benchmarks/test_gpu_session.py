"""One call for a lent GPU: each step within its limit, none stops another, and what was found is there at once."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import lora, ranks, rows, session
from benchmarks.gpu.session import Session
from benchmarks.gpu.stages import Job

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "POLL_SECONDS", 0.05)
    (tmp_path / "out").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path


def _python(name, code, seconds=60.0):
    return Job(name, ("-c", code), seconds)


def _found(folder, name="steps.json"):
    text = (folder / "out" / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith("json") else text


def test_steps_that_fail_or_hang_stop_no_other(folder):
    run = Session(folder / "out", folder / "work", {"gpu": "none"}, minutes=5)
    hangs = _python("hangs", "import time; print('begun', flush=True); time.sleep(600)", 3.0)
    run.run([_python("fails", "raise SystemExit(3)"), hangs])
    table = folder / "work" / "table A"
    table.mkdir()
    code = f"p = r'{table}/table-a-cpu'; open(p + '.json', 'w').write('[1]'); open(p + '.md', 'w').write('A')"
    run.run([_python("table A", code)])
    assert {step["step"]: step["status"] for step in _found(folder)["steps"]} == {
        "fails": 3,
        "hangs": "cut short",
        "table A": 0,
    }
    assert _found(folder, "tables.json") == {"table A": [1]}
    assert _found(folder, "tables.md") == "A"
    assert "begun" in _found(folder, "log.txt")
    assert len(list((folder / "out").iterdir())) <= 8


def test_nothing_begins_when_the_time_is_spent(folder):
    Session(folder / "out", folder / "work", {}, minutes=0).run([_python("late", "raise SystemExit(3)")])
    assert _found(folder)["steps"] == [{"step": "late", "status": "left out"}]


@pytest.mark.parametrize("quick", [False, True])
def test_steps_are_commands_that_are_understood(quick):
    steps = [
        *session.together(CPU, Path("rows"), quick=quick),
        *session.compiled(CPU, Path("rows"), Path("work"), quick=quick),
        *session.alone(CPU, Path("rows"), Path("tables"), quick=quick),
    ]
    names = [step.name for step in steps]
    assert {"tests", "agreement", "ranks", "graph lora", "lora nonprivate", "lora bookkeeping"} <= set(names)
    assert len(set(names)) == len(names)
    if find_spec("opacus"):
        assert {"table A mnist-cnn", "table B", "table C", "table D gpt2", "table E"} <= set(names)
    for step in steps:
        if step.arguments[1] == "paper_repro":
            from paper_repro.__main__ import _chosen, _parser

            options = _parser().parse_args(step.arguments[2:])
            assert _chosen(_parser(), options, "tiny" if quick else "full")[1]


@pytest.mark.parametrize("engine", ["nonprivate", "bookkeeping"])
def test_adapters_beside_a_large_model(tmp_path, engine):
    place = tmp_path / "rows"
    assert lora.main(["--device", "cpu", "--quick", "--rows", str(place), "--engine", engine]) == 0
    (row,) = rows.read(place)
    assert row["status"] == "ok", row
    assert row["seconds"] > 0


def test_adapters_alone_are_trained():
    task = lora.fine_tuning(lora.large_model("llama-1b"), quick=True, quantised=False)
    trained = {name.split(".")[-2] for name, p in task.make_model().named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_gloo_and_what_has_no_gpu(tmp_path):
    place = tmp_path / "rows"
    assert ranks.main(["--device", "cpu", "--rows", str(place), "--ranks", "2"]) == 0
    gloo, nccl = rows.read(place)
    assert gloo["status"] == "ok", gloo
    assert nccl["status"] in ("cannot", "ok"), nccl
