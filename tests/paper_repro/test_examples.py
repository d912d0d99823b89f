"""Every example runs from its command line; with its defaults, which takes a while, it learns."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from ghostclip.clipping import policies
from ghostclip.clipping.coefficients import clip_coefficients
from paper_repro.examples import __main__ as program
from paper_repro.examples import audited, data
from tests.audit import mutations
from tests.integrations import timm_stand_in as stand_in

TINY = list(audited.TINY)
HERE = ("mnist", "cifar_resnet", "bert_text", "char_lstm", "dcgan")
HOSTS = {"hf_trainer": "transformers", "peft_lora": "peft", "trl_sft": "trl", "trl_dpo": "trl"}


def passes_its_audit(name):
    found = audited.audit(name)
    assert not found.problems()
    assert 0 < found.epsilon < 1000
    assert 0 <= found.found.get("accuracy", 0) <= 1
    return found


@pytest.mark.parametrize("name", HERE)
def test_an_example_passes_its_audit(name):
    passes_its_audit(name)


def clipped_to_twice_the_bound():
    def twice(norm_B, bound, *, largest=math.inf):
        return clip_coefficients(norm_B, 2 * bound, largest=largest)

    return mock.patch.object(policies, "clip_coefficients", twice)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (mutations.half_the_noise, "noise of"),
        (mutations.steps_forgotten, "is due"),
        (clipped_to_twice_the_bound, "a record adds"),
    ],
)
def test_an_audit_sees_what_is_broken(broken, said):
    with broken():
        found = audited.audit("mnist")
    assert any(said in problem for problem in found.problems()), found.problems()


def test_an_example_prints_what_it_finds(capsys):
    assert 0 < program.run("mnist", TINY)["found"]["epsilon"] < 1000
    assert "epoch 1: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_of_two_processes_runs(capfd):
    found = program.run("mnist_ddp", TINY)["found"]
    assert 0 < found["epsilon"] < 1000
    printed = capfd.readouterr().out
    assert "rank 0" in printed
    assert "rank 1" in printed


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "host"),
    [("mnist_lightning", "lightning"), ("mnist_fabric", "lightning"), ("mnist_accelerate", "accelerate")],
)
def test_an_example_of_a_host_passes_its_audit(name, host):
    pytest.importorskip(host, reason="an extra of its own")
    passes_its_audit(name)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_timm_passes_its_audit():
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    stand_in.timm()
    passes_its_audit("mnist_timm")


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOSTS)
def test_the_examples_of_trainers_pass_their_audits(name):
    pytest.importorskip(HOSTS[name])
    assert 7 < passes_its_audit(name).epsilon <= 8


@pytest.mark.parametrize("name", [*HOSTS, "mnist_lightning", "mnist_fabric", "mnist_accelerate", "mnist_timm"])
def test_the_examples_of_trainers_are_short(name):
    lines = (Path(program.__file__).parent / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOSTS)
def test_an_example_of_trainers_learns(name):
    pytest.importorskip(HOSTS[name])
    found = program.run(name)["found"]
    if "accuracy" in found:
        assert found["accuracy"] > 1.3 * found["chance"]
    else:
        assert found["perplexity"] < 0.97 * found["before"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HERE, "mnist_ddp"])
def test_an_example_learns(name):
    found = program.run(name)["found"]
    if name == "dcgan":
        assert found["after"] < 0.5 * found["before"]
    else:
        assert found["accuracy"] > 1.3 * found["chance"]


def test_digits_are_told_apart():
    """The glyphs are ten different ones, and the drawn digits are nearer to their own."""
    glyphs = data._glyphs()
    assert len({tuple(glyph.flatten().tolist()) for glyph in glyphs}) == 10
    images, labels = data.digits(400).tensors
    means = [images[labels == label].mean(0) for label in range(10)]
    nearest = [min(range(10), key=lambda k: (image - means[k]).norm()) for image in images]
    assert sum(a == b for a, b in zip(nearest, labels.tolist(), strict=True)) > 200


def test_a_paragraph_comes_once():
    texts = [text for _, text in data.paragraphs()]
    assert len(texts) == len(set(texts)) > 1000


def test_table_of_what_was_reached(tmp_path, monkeypatch, capsys):
    found = {
        "mnist": {"accuracy": 0.5, "chance": 0.1, "epsilon": 3.0},
        "dcgan": {"before": 1.0, "after": 0.25, "epsilon": 2.0},
    }

    def run(name, arguments=()):
        if name not in found:
            return {"name": name, "missing": "lightning"}
        return {"name": name, "about": "about", "found": found[name], "seconds": 2.0}

    seen = {
        "problems": [],
        "error": 2e-6,
        "move": 1.0,
        "noise": 1.0,
        "epsilon": 3.0,
        "epsilon_due": 3.0,
        "canaries": 0.5,
    }
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program, "audit", lambda name: seen if name == "mnist" else None)
    monkeypatch.setitem(audited.NOT_AUDITED, "dcgan", "a reason")
    assert program.main(["mnist", "dcgan", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "examples-cpu.md").read_text("utf-8")
    assert "| `mnist` | about | 50.0% right | 10.0% | 3.00 | 2 | passed: first sum off by 2e-06" in page
    assert "| `dcgan` | about | distance 0.25 | 1.00 | 2.00 | 2 | not audited: a reason |" in page
    seen["problems"] = ["something is off"]
    assert program.main(["mnist"]) == 1
    assert len(json.loads((tmp_path / "examples-cpu.json").read_text("utf-8"))["examples"]) == 2
    assert program.main(["mnist_lightning"]) == 1
    assert "needs lightning" in capsys.readouterr().out


def test_command_line(capsys):
    assert program.main(["--list"]) == 0
    assert all(name in capsys.readouterr().out for name in ("mnist",))
    with pytest.raises(SystemExit):
        program.main(["mnits"])
    assert "no example mnits" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.run("mnist", ["--epochs", "0"])
    assert "no whole number above 0" in capsys.readouterr().err
