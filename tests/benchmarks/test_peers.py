"""Whoever is compared computes the clipped sum, says why not, or is named as missing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import peers
from benchmarks.correctness import reference
from benchmarks.engines import NON_PRIVATE, CannotDo, Engine
from benchmarks.flops import count
from benchmarks.peers import every_engine, missing
from benchmarks.peers.per_sample import clipped_sum
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


def test_a_model_that_nobody_wrote_in_jax_is_refused():
    pytest.importorskip("jax", reason="no dependency of the tests")
    with pytest.raises(CannotDo, match="Linear is not written in JAX"):
        _engine("jax").attach(nn.Linear(2, 2), 1.0)


def test_what_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None if package == "jax" else object())
    assert missing() == [{"title": "JAX", "install": "pip install jax"}]


def test_clipped_sum_clips_samples_and_not_parameters():
    gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])]
    first, second = clipped_sum(gradients, 1.0)
    torch.testing.assert_close(first, torch.tensor([0.6 + 0.3]))
    torch.testing.assert_close(second, torch.tensor([0.8 + 0.4]))


def test_a_runner_that_counts_itself_is_asked():
    task = find("mlp", quick=True)
    runner = NON_PRIVATE.attach(task.model(CPU), 1.0)
    assert count(runner, task.batch(CPU)) > 0
    runner.operations = lambda _: None
    assert count(runner, task.batch(CPU)) is None
