"""Several processes under torchrun make the run that one makes: the same epsilon, noise and weights, said once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import TEXT, assert_refused
from tests.cli.ranks import Job, run
from tests.process_group import start_ranks

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.distributed]

# Two blocks, of which each is divided by itself; sizes that two do not divide.
SIZES = ["--layers", "2", "--hidden-size", "15", "--heads", "3", "--context-length", "23"]
GIVEN = ["--data", "text.txt", "--steps", "4", "--batch-size", "7", "--physical-batch-size", "2", "--device", "cpu"]
FIXED = [*GIVEN, "--eval-samples", "5", "--seed", "1", "--unsafe-noise-seed", "1"]
COMMON = [*SIZES, *FIXED]
LORA = [*FIXED, "--model", "base", "--tokenizer", "bytes", "--lora", "2", "--learning-rate", "0.05"]

# Layers of which each process has a part; heads that two divide.
LAYERS = [*FIXED, "--toy", "llama", "--layers", "2", "--hidden-size", "16", "--heads", "4", "--context-length", "23"]

JOBS = {
    "copies": Job([*COMMON, "--output", "copies"]),
    "stopped": Job([*COMMON, "--output", "stopped"], stops=1),
    "mesh of three": Job([*COMMON, "--output", "none", "--mesh", "dp=3"]),
    "layers": Job([*LAYERS, "--output", "layers", "--mesh", "tp=2"]),
    "stopped layers": Job([*LAYERS, "--output", "stopped-layers", "--mesh", "tp=2"], stops=1),
    "layers, resumed": Job(["--resume", "--output", "stopped-layers", "--mesh", "dp=2"]),
    "average of parts": Job([*COMMON, "--output", "none", "--mesh", "dp=2", "--average", "ema"]),
    "no plan": Job([*COMMON, "--output", "none", "--mesh", "tp=2"]),
    "odd heads": Job([*LAYERS, "--output", "none", "--mesh", "tp=2", "--hidden-size", "18", "--heads", "3"]),
    "adapters of layers": Job([*LORA, "--output", "none", "--mesh", "tp=2"]),
    "tiles of layers": Job([*LAYERS, "--output", "none", "--mesh", "tp=2", "--vocabulary-head", "fused"]),
    "a device": Job([*COMMON, "--output", "none", "--device", "cuda:1"]),
    "no size": Job([*COMMON, "--output", "none", "--mesh", "dp=2", "--physical-batch-size", "auto"]),
    "wrong on one": Job([*COMMON, "--output", "none"], only=["--epsilon", "-1"]),
    "other epsilon on one": Job([*COMMON, "--output", "none"], only=["--epsilon", "3"]),
    "parts": Job([*COMMON, "--output", "parts", "--mesh", "dp=2"]),
    "resumed": Job(["--resume", "--output", "stopped", "--mesh", "dp=2"]),
    "stopped parts": Job([*COMMON, "--output", "stopped-parts", "--mesh", "dp=2"], stops=0),
    "adapters in parts": Job([*LORA, "--output", "adapters-in-parts", "--mesh", "dp=2"]),
}
REFUSED = {
    "mesh of three": "--mesh dp=3 is of 3 processes, but there are 2",
    "average of parts": "--average with --mesh: averages of a model in parts are not kept",
    "no plan": "GPT2LMHeadModel has no plan of tensor parallelism (tp_plan)",
    "odd heads": "3 num_attention_heads cannot be shared by tp=2",
    "adapters of layers": "--lora with --mesh dp=1,tp=2: a model's plan of tensor parallelism says nothing of adapters",
    "tiles of layers": "--vocabulary-head fused with --mesh dp=1,tp=2: each process has some rows of the head",
    "a device": "--device cuda:1 with 2 processes: each has its own",
    "no size": "--physical-batch-size auto with --mesh dp=2",
    "wrong on one": "rank 1 was refused, and no rank goes on without it: --epsilon is -1",
    "other epsilon on one": "--epsilon of rank 1 is 3.0, of rank 0 8.0",
}
QUICK = ("copies", "wrong on one", "parts")


def _save_base(folder):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=260, n_positions=23, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    _save_base(folder / "base")
    return folder


def _seen(folder, jobs, *, ranks=2):
    (folder / "ports").unlink(missing_ok=True)
    start_ranks(run, ranks, str(folder), jobs)
    return [torch.load(folder / f"seen{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def quick(work):
    return _seen(work, {name: JOBS[name] for name in QUICK})


@pytest.fixture(scope="module")
def others(work, quick):
    return _seen(work, {name: job for name, job in JOBS.items() if name not in QUICK})


def _weights(folder):
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _as_one_process(finetune, record_of, work, monkeypatch, *, name, words):
    """Compare a run of two processes with the run of one, which is made once for all that it is compared with."""
    monkeypatch.chdir(work)
    folder = work / f"alone{[COMMON, LAYERS, LORA].index(words)}"
    if not folder.exists():
        alone = finetune(*words, "--output", folder)
        assert alone.status == 0, alone.err
    one, two = record_of(folder), record_of(work / name)
    assert two["privacy"]["epsilon"] == one["privacy"]["epsilon"]
    assert two["privacy"]["steps_spent"] == one["privacy"]["steps_spent"]
    assert two["not_private"]["samples"] == one["not_private"]["samples"]
    assert two["not_private"]["losses"] == pytest.approx(one["not_private"]["losses"], abs=1e-6)
    (quality,) = (name for name in one if name in ("held_out_perplexity", "held_out_loss"))
    assert two[quality]["after"] == pytest.approx(one[quality]["after"], rel=1e-6)
    want, got = _weights(folder), _weights(work / name)
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
    return two


def _went(seen, name):
    first, *others = (rank[name] for rank in seen)
    assert first[0] == 0, first[2]
    assert "samples at once, clipped by" in " ".join(first[1].split())
    assert others == [(0, "", "")] * len(others)
    return first[1]


@pytest.mark.parametrize("name", ["copies", "parts"])
def test_two_processes_make_the_run_of_one(quick, finetune, record_of, work, monkeypatch, name):
    assert "on cpu in 2 processes" in " ".join(_went(quick, name).split())
    record = _as_one_process(finetune, record_of, work, monkeypatch, name=name, words=COMMON)
    assert record["machine"]["processes"] == 2
    assert record["options"]["mesh"] == (None if name == "copies" else "dp=2")
    assert not (work / name / "private" / "resume").exists()


@pytest.mark.slow
def test_two_processes_with_parts_of_layers_make_the_run_of_one(others, finetune, record_of, work, monkeypatch):
    _went(others, "layers")
    record = _as_one_process(finetune, record_of, work, monkeypatch, name="layers", words=LAYERS)
    assert record["options"]["mesh"] == "tp=2"


@pytest.mark.slow
def test_shards_go_on_with_parts_of_layers(others, finetune, record_of, work, monkeypatch):
    name = "layers"
    assert [rank[f"stopped {name}"][0] for rank in others] == [130, 130]
    _went(others, f"{name}, resumed")
    record = _as_one_process(finetune, record_of, work, monkeypatch, name=f"stopped-{name}", words=LAYERS)
    assert record["sessions"] == 2


@pytest.mark.slow
def test_two_processes_train_the_adapters_of_one(others, finetune, record_of, work, monkeypatch):
    folder = "adapters-in-parts"
    _went(others, "adapters in parts")
    _as_one_process(finetune, record_of, work, monkeypatch, name=folder, words=LORA)
    assert (work / folder / "adapter_config.json").exists()


@pytest.mark.slow
def test_what_one_process_is_asked_to_stop_two_go_on_with(others, finetune, record_of, work, monkeypatch):
    """One of two is asked; the run goes on with the model in parts, and is the one that nobody stopped."""
    for name in ("stopped", "stopped parts"):
        for status, out, err in (rank[name] for rank in others):
            assert status == 130
            assert ("stopped after step 2 of 4" in err) == bool(out)
        assert "torchrun --nproc-per-node 2 -m ghostclip finetune --resume" in others[0][name][2]
    _went(others, "resumed")
    record = _as_one_process(finetune, record_of, work, monkeypatch, name="stopped", words=COMMON)
    assert record["sessions"] == 2
    # And one process goes on with what two had in parts.
    assert finetune("--resume", "--output", "stopped-parts", "--mesh", "dp=1").status == 0
    _as_one_process(finetune, record_of, work, monkeypatch, name="stopped-parts", words=COMMON)


@pytest.mark.slow
def test_four_processes_hold_two_copies_in_parts(finetune, record_of, work, monkeypatch):
    job = Job([*COMMON, "--output", "both", "--mesh", "replicate=2,dp=2"])
    _went(_seen(work, {"both": job}, ranks=4), "both")
    _as_one_process(finetune, record_of, work, monkeypatch, name="both", words=COMMON)


@pytest.mark.slow
def test_four_processes_hold_parts_of_layers(finetune, record_of, work, monkeypatch):
    mesh = "dp=2,tp=2"
    name = mesh.replace(",", "-")
    _went(_seen(work, {name: Job([*LAYERS, "--output", name, "--mesh", mesh])}, ranks=4), name)
    _as_one_process(finetune, record_of, work, monkeypatch, name=name, words=LAYERS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in REFUSED]
)
def test_what_processes_must_not_be_given_is_refused_by_all_and_said_once(request, name):
    seen = request.getfixturevalue("quick" if name in QUICK else "others")
    (status, out, err), (other_status, *silent) = (rank[name] for rank in seen)
    assert status == 2
    assert other_status == 2
    assert REFUSED[name] in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert silent == ["", ""]


def _torchrun(folder, *words):
    """The command, as a shell starts it; what it says on stderr goes to a file."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "said.txt").open("w") as said:
        command = [*launcher, "-m", "ghostclip", "finetune", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=said)


@pytest.mark.slow
def test_torchrun_is_interrupted_and_goes_on(work, record_of):
    words = ["--steps", "60", "--mesh", "dp=2", "--output", "launched"]
    process = _torchrun(work, *SIZES, *GIVEN, *words)
    ledger, waited = work / "launched" / "private" / "resume" / "ledger.txt", time.monotonic() + 120
    while not (ledger.exists() and len(ledger.read_bytes().splitlines()) > 4):
        assert process.poll() is None, (work / "said.txt").read_text()
        assert time.monotonic() < waited
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    said = (work / "said.txt").read_text()
    # Process 0 may hear of it from the other before its own signal has come.
    assert said.count("stopping after this step") <= said.count("stopped after step") == 1
    assert _torchrun(work, "--resume", "--output", "launched").wait(120) == 0, (work / "said.txt").read_text()
    record = record_of(work / "launched")
    assert record["sessions"] == 2
    assert record["privacy"]["steps_spent"] == 60
    assert None not in record["not_private"]["losses"]


def test_processes_that_do_not_know_of_each_other_are_refused(finetune, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    result = finetune("--data", text_file, "--output", tmp_path / "out", *SIZES)
    assert_refused(result, "WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT, RANK: start the processes with torchrun")
    assert not (tmp_path / "out").exists()


def test_a_mesh_without_torchrun_is_refused(finetune, text_file, tmp_path):
    result = finetune("--data", text_file, "--output", tmp_path / "out", *SIZES, "--mesh", "dp=2")
    assert_refused(result, "--mesh dp=2 is of 2 processes, but there is 1: start them with torchrun --nproc-per-node 2")
