"""The one command for a GPU: its pieces on a CPU, what it does when something is wrong, slow or too large."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import agreement, graph, large, one_step, peaks, products, rows, stages, twins
from benchmarks.gpu.models import large_models
from benchmarks.gpu.page import markdown
from benchmarks.gpu.stages import Job, Stage
from ghostclip.graph import GraphOptions

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("case", large_models(), ids=lambda case: case.name)
def test_models_have_the_size_they_are_named_for(case):
    with torch.device("meta"):
        model = case.task.make_model()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert round(millions) == {"gpt2-large": 838, "llama-1b": 1498}[case.name]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "class_name", "options"),
    [
        ("gpt2-large", "GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": 97}),
        (
            "llama-1b",
            "Llama",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
            | {"intermediate_size": 128, "vocab_size": 97, "max_position_embeddings": 24, "rope_theta": 5e5},
        ),
    ],
)
def test_models_compute_what_those_of_transformers_compute(name, class_name, options):
    transformers = pytest.importorskip("transformers")
    kind = "GPT2LMHeadModel" if class_name == "GPT2" else "LlamaForCausalLM"
    config = getattr(transformers, f"{class_name}Config")(**options, tie_word_embeddings=False)
    theirs = getattr(transformers, kind)(config).eval()
    case = next(case for case in large_models() if case.name == name)
    ours = case.small.model(CPU).eval()
    pairs = list(zip(_ordered(theirs), _ordered(ours), strict=True))
    with torch.no_grad():
        for their, our in pairs:
            assert their.shape == our.shape
            their.copy_(our)
    ids_BT, _ = case.small.batch(CPU)
    torch.testing.assert_close(theirs(input_ids=ids_BT).logits, ours(ids_BT), rtol=1e-4, atol=1e-5)


def _ordered(model):
    """Parameters, those of a block in the order of their sizes and names' roles."""
    order = ("wte", "token", "embed_tokens", "wpe", "position", "input_layernorm", "ln_1", "attention_norm")
    order += ("q_proj", "query", "k_proj", "key", "v_proj", "value", "c_attn", "attention_in", "o_proj")
    order += ("attn.c_proj", "attention_out", "post_attention", "ln_2", "mlp_norm", "gate", "up", "c_fc", "mlp_in")
    order += ("down", "mlp.c_proj", "mlp_out", "ln_f", "norm", "head")

    def place(item):
        name = item[0]
        block = next((int(part) for part in name.split(".") if part.isdigit()), 10**6 if "norm" in name else 10**7)
        block = -1 if any(part in name for part in ("wte", "token", "wpe", "position")) else block
        block = 10**6 if "ln_f" in name else block
        role = next(number for number, part in enumerate(order) if part in name)
        return block, role, name.rpartition(".")[2] != "weight"

    return [parameter for _, parameter in sorted(model.named_parameters(), key=place)]


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


def test_a_strategy_that_is_wrong_is_said_to_be(written, monkeypatch):
    monkeypatch.setattr(agreement, "checked", lambda engine, *_: {"status": "wrong", "error": 0.5})
    monkeypatch.setattr(agreement, "_bounded", lambda job: None)
    assert {row["status"] for row in written(agreement).values()} == {"wrong"}


def test_products_are_compared_with_float64(written):
    found = written(products)
    plain = [row for name, row in found.items() if "widened" in name]
    assert all(row["error"] < 1e-6 and abs(row["constant_error"]) < 1e-6 and row["tflops"] > 0 for row in plain)
    assert all(row["status"] == "cannot" for name, row in found.items() if "out_dtype" in name)
    assert found["this device's largest rates"]["gb_s"] > 0


def test_sums_that_are_cut_off_show_on_constant_data():
    (product, *_) = products.products(CPU, quick=True)

    def cut_off(one, two):
        return torch.bmm(one.double(), two.double().mT).mul(2**-4).floor().mul(2**4)

    assert products._error(product, cut_off, "constant") < -1e-2


def test_noise_is_timed_and_looked_at(written):
    found = written(twins)
    assert found["fast noise, 16,384 values"]["status"] == found["secure noise, 16,384 values"]["status"] == "ok"


@pytest.mark.parametrize(
    ("statuses", "gains", "verdict"),
    [
        (["ok", "ok"], [1.5, 2.0], "may be switched on"),
        (["ok", "ok"], [0.9, 1.1], "right, leave off: no gain shown"),
        (["ok", "wrong"], [1.5, 2.0], "leave off: wrong"),
        (["ok"], [], "right, leave off: no gain shown"),
    ],
)
def test_verdict_on_a_kernel(statuses, gains, verdict):
    given = [{"status": status} for status in statuses]
    for row, gain in zip(given, gains, strict=False):
        row["speed_up"] = gain
    assert twins.verdict("gram", given)["verdict"] == verdict


# The compiler looks at every attribute of what it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("engine", ["nonprivate", "bookkeeping", "compiled"])
def test_a_way_to_train_a_large_model(written, engine):
    (row,) = written(large, "--case", "gpt2-large", "--engine", engine).values()
    assert row["status"] == "ok", row
    assert {"seconds", "peak_bytes", "roof_seconds", "batch_size"} <= set(row)


def test_what_is_not_installed_is_said(written):
    (row,) = written(large, "--case", "llama-1b", "--engine", "opacus-nowhere").values()
    assert (row["status"], row["problem"]) == ("cannot", "not installed (pip install opacus)")


def test_one_step_is_taken_apart(written):
    found = written(one_step, "--case", "llama-1b")
    assert {row["status"] for row in found.values()} == {"ok"}, found
    names = list(found)
    assert [name.partition(",")[0] for name in names[1:]] == [
        "samples whose norms are formed in float64",
        "profile of a step",
        "one release",
    ]
    assert found[names[2]]["longest"]
    assert found[names[3]]["seconds"] > 0


def test_memory_that_runs_out_is_a_row(tmp_path):
    job = rows.Job(CPU, True, tmp_path / "rows", None)
    with job.case("too large"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
    with job.case("broken"):
        raise ZeroDivisionError("by zero")
    assert [row["status"] for row in rows.read(tmp_path / "rows")] == ["out of memory", "failed"]


def test_a_row_that_was_cut_in_the_middle_is_left_out(tmp_path):
    place = tmp_path / "rows"
    place.write_text('{"case": "whole"}\n{"case": "ha', encoding="utf-8")
    assert rows.read(place) == [{"case": "whole"}]


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA L4", 121)],
)
def test_rates_of_known_devices(name, bf16):
    assert peaks.on_the_sheet(name).bf16 == bf16 * 1e12


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090", "Tesla T4"])
def test_rates_of_others_are_measured(name):
    assert peaks.on_the_sheet(name) is None
    assert peaks.measured(CPU, quick=True).memory > 0


def test_operations_of_a_step():
    case = large_models()[0]
    with torch.device("meta"):
        flops = peaks.flops_of_step(case.task.make_model(), 8, 1024)
    assert flops == pytest.approx(6 * 8192 * (36 * 12 * 1280**2 + 1280 * 50257))


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


def test_another_strategy_that_is_wrong_does_not_end_the_run(tmp_path, monkeypatch):
    mixed = writes({"case": "gpt, bookkeeping", "status": "ok"}, {"case": "gpt, hooks", "status": "wrong"})
    code, report = run_stages(
        monkeypatch,
        tmp_path,
        Stage("agreement", "Right?", (python(mixed),), 1.0, "bookkeeping"),
        Stage("rest", "Runs", (python("print('here')", writes_rows=False),), 1.0),
    )
    assert code == 1
    assert report["stages"][1]["rows"] == [{"case": "job", "status": "ok", "problem": "here"}]


def test_a_job_that_fails_or_hangs_keeps_nobody_from_running(tmp_path, monkeypatch):
    hangs = writes({"case": "first", "status": "ok"}) + "; import time; time.sleep(60)"
    jobs = python(hangs, seconds=3.0, name="hangs"), python("1/0", name="fails"), python(writes(), name="good")
    code, report = run_stages(monkeypatch, tmp_path, Stage("rest", "All", jobs, 1.0))
    found = [(row["case"], row["status"]) for row in report["stages"][0]["rows"]]
    assert found == [("first", "ok"), ("hangs", "cut short"), ("fails", "failed")]
    assert "ZeroDivisionError" in report["stages"][0]["rows"][2]["problem"]
    assert code == 1
    assert not list(tmp_path.glob("*.rows"))


def test_nothing_starts_when_the_time_is_spent(tmp_path, monkeypatch):
    stage = Stage("rest", "All", (python("1/0"),), 1.0)
    code, report = run_stages(monkeypatch, tmp_path, stage, arguments=["--minutes", "0.01"])
    assert (code, report["stages"][0]["rows"][0]["status"]) == (0, "left out")


def test_what_a_run_measured_outlives_it(tmp_path):
    """The report is written while a job runs; a run that is ended ends what it started."""
    program = (
        "import sys; from benchmarks.gpu import __main__ as gpu; from benchmarks.gpu.stages import Job, Stage\n"
        f"code = {writes({'case': 'early', 'status': 'ok'})!r} + '; import os, time; "
        "print(os.getpid(), flush=True); time.sleep(60)'\n"
        "gpu.stages = lambda device, *, quick: [Stage('rest', 'All', (Job('job', ('-c', code), 60.0),), 1.0)]\n"
        f"gpu.main(['--device', 'cpu', '--quick', '--out', {str(tmp_path)!r}])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment)
    report = tmp_path / "gpu-cpu-quick.json"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (report.exists() and "early" in report.read_text(encoding="utf-8")):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert json.loads(report.read_text(encoding="utf-8"))["stages"][0]["rows"] == [{"case": "early", "status": "ok"}]
    stat = Path(f"/proc/{int((tmp_path / 'gpu-cpu-quick-rest.log').read_text())}/stat")
    for _ in range(50):
        # Gone, or dead and not yet collected by whoever adopted it.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("still running")


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


def test_stages_fit_the_time():
    found = stages.stages(torch.device("cuda"), quick=False)
    assert sum(stage.share for stage in found[:-1]) <= 1
    assert [stage.name for stage in found if stage.decides] == ["agreement"]


def test_a_page_of_every_kind_of_row():
    row = {"status": "ok", "engine": "nonprivate", "seconds": 0.1, "peak_bytes": 2**30, "roof_seconds": 0.05}
    row |= {"batch_size": 8}
    slow = {**row, "case": "private", "engine": "bookkeeping", "seconds": 0.15, "steady_bytes": 3 * 2**29}
    full = {"case": "huge", "status": "out of memory", "problem": "CUDA out of memory", "engine": "ghost"}
    kernel = {"case": "verdict: gram", "status": "ok", "verdict": "may be switched on", "speed_up": 1.4}
    report = {
        "command": "python -m benchmarks.gpu",
        "machine": gpu.head("x", [], CPU, quick=False)["machine"],
        "date": "2026-01-01",
        "quick": False,
        "minutes": 8.0,
        "missing": ["opacus"],
        "stages": [
            {"name": "gpt2-large", "title": "Large", "rows": [{**row, "case": "base"}, slow, full]},
            {"name": "twins", "title": "Twins", "rows": [kernel]},
        ],
    }
    text = markdown(report)
    assert "- private: 1.50× time, 1.50× memory of ordinary training" in text
    assert "- huge: out of memory: CUDA out of memory" in text
    assert "- gram: may be switched on" in text
    assert "| base | 100.0 | 1.00× | 50% | 1024 | 1.00× | 1024 | 80.0 |" in text
    assert "Not installed: opacus." in text


@pytest.mark.slow
def test_the_rehearsal_runs_every_stage(tmp_path):
    assert gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-cpu-quick.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in report["stages"]] == [stage.name for stage in stages.stages(CPU, quick=True)]
    found = [row for stage in report["stages"] for row in stage["rows"]]
    assert {row["status"] for row in found} <= {"ok", "cannot"}
