"""Whoever is compared computes the clipped sum, says why not, or is named as missing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.correctness import reference
from benchmarks.engines import Engine
from benchmarks.peers import every_engine
from benchmarks.run import checked
from benchmarks.tasks import find

CPU = torch.device("cpu")
# Where a library reaches; elsewhere it has to say why.
REACH = {
    "opacus-hooks": {"gpt", "cnn", "mlp", "resnet", "lstm"},
    "opacus-ghost": {"gpt", "cnn", "mlp", "resnet", "lstm"},
    "opacus-functorch": {"gpt", "cnn", "mlp", "resnet", "lstm"},
    "opacus-ew": {"gpt", "cnn", "mlp", "resnet", "lstm"},
    "torch-func": {"gpt", "cnn", "mlp", "resnet", "lstm"},
    "backpack": {"cnn", "mlp", "lstm"},
    "jax": {"gpt", "cnn", "mlp"},
}
REASONS = {"backpack": "has no rule for", "jax": "is not written in JAX here"}


def _engine(name: str) -> Engine:
    found = [engine for engine in every_engine() if engine.name == name]
    if not found:
        pytest.skip(f"{name} is not installed; no dependency of the tests")
    return found[0]


@pytest.fixture(scope="module")
def expected():
    return {name: reference(find(name, quick=True), CPU) for name in ("gpt", "cnn", "mlp", "resnet", "lstm")}


@pytest.mark.parametrize("name", REACH)
# What other libraries warn of is theirs.
@pytest.mark.filterwarnings("ignore")
def test_a_peer_is_right_or_says_why(name, expected):
    engine = _engine(name)
    for task_name, wanted in expected.items():
        row = checked(engine, find(task_name, quick=True), CPU, wanted)
        if task_name in REACH[name]:
            assert row["status"] == "ok", row
            # Small models leave little to round, and this tells the two forms of GELU apart. Measured: 1.3e-6.
            assert row["error"] <= 1e-5
        else:
            assert row["status"] == "cannot", row
            assert REASONS[name] in row["problem"]


def test_an_engine_that_is_wrong_is_marked(expected):
    class Doubled:
        def __init__(self, model, max_grad_norm):
            self.runner = _engine("torch-func").attach(model, max_grad_norm)

        def step(self, batch):
            self.runner.step(batch)

        def result(self):
            return [2 * part for part in self.runner.result()]

    row = checked(Engine("x", "X", True, Doubled), find("mlp", quick=True), CPU, expected["mlp"])
    assert row["status"] == "wrong"
    assert row["error"] == pytest.approx(1.0, abs=1e-4)
