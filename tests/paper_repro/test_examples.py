"""Every example runs from its command line; with its defaults, which takes a while, it learns."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from ghostclip.clipping import policies
from ghostclip.clipping.bounds import clip_coefficients
from paper_repro.examples import __main__ as program
from paper_repro.examples import audited
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
