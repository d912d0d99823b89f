"""``ghostclip inspect``: right figures for what runs, place and remedy for what does not, one line for wrong input."""

from __future__ import annotations

import json
from functools import partial

import pytest

import ghostclip
from benchmarks.flops import counter
from ghostclip.validation.inspection import InspectionRequest, inspect_model, load_source, losses_of
from tests.cli.conftest import assert_refused

SCRIPT = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        h = self.layer(x)
        return h - h.mean(0)


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, *, scale=1.0):
        return x * self.weight * scale


def resnet():
    return nn.Sequential(nn.Conv2d(3, 6, 3), *[Block(6) for _ in range(5)], nn.Flatten(1), nn.LazyLinear(2))


def blocks():
    return nn.Sequential(nn.Conv2d(3, 6, 3), *[Block(6) for _ in range(5)])


def recurrent():
    return Recurrent()


def mixes():
    return Mixes()


def raw():
    return Raw()


def with_batch(batch_size):
    return Raw(), {"x": torch.randn(batch_size, 4), "scale": 2.0}


def mlp():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))


def misfit(batch_size):
    return mlp(), torch.randn(batch_size, 7)


def breaks():
    raise KeyError("no such key")


def number():
    return 3
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def inspect(command):
    return partial(command, "inspect")


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama", "mixtral", "t5"])
def test_architectures(inspect, name):
    result = inspect(name, "--sequence-length", 12)
    assert result.status == 0, result
    lines = result.out.splitlines()
    assert lines[0].startswith(f"{name} (")
    assert "stand-in" in lines[0]
    assert "nothing is refused" in lines[1]
    # It is small and slow in another way than the real sizes.
    assert "expected FLOPs" not in result.out
    assert "shows no costs: --full" in result.out
    assert "not used yet" not in result.out


@pytest.mark.parametrize(("name", "strategy"), [("gpt2", "ghost"), ("gpt2", "hooks"), ("bert", "bookkeeping")])
def test_expected_operations_are_those_of_the_step(name, strategy):
    """The whole step is predicted: layers, attention and, for two backwards, attention's backward once more."""
    source = load_source(InspectionRequest(name, batch_size=3, sequence_length=20))
    source.model.eval()
    found = inspect_model(source, strategy=strategy)

    def losses():
        return losses_of(source.call(), batch_size=3, axis=0)

    with counter() as base:
        losses().sum().backward()
    source.model.zero_grad(set_to_none=True)
    with ghostclip.GhostClipper(source.model, max_grad_norm=1.0, strategy=strategy) as clipper:
        clipper.backward(losses())
        clipper.reset()
        with counter() as private:
            clipper.backward(losses())
    ratio = private.get_total_flops() / base.get_total_flops()
    # Fused attention, which is the same in both, is in the prediction and not in the count.
    assert found.flop_ratio == pytest.approx(ratio, rel=0.06)


def test_real_sizes_from_shapes_alone(inspect):
    result = inspect("gpt2", "--full", "--batch-size", 8, "--sequence-length", 512, "--json", "-")
    assert result.status == 0, result
    found = json.loads(result.out)
    assert found["parameters"]["all"] == 124_439_808
    # Six per weight of a product and token, and attention's own.
    assert found["non_private"]["flops"] > 6 * 8 * 512 * 85e6
    assert 1 < found["flop_ratio"] < 7 / 6
    plans = {row["name"]: row["plan"] for row in found["coverage"]["parameters"]}
    assert "symmetric Gram" in plans["transformer.h.11.mlp.c_fc.weight"]


def test_batch_norm_is_refused_with_the_remedy(inspect, script):
    result = inspect(f"{script}:blocks")
    assert result.status == 3
    assert "REFUSED 1.norm (BatchNorm2d), 2.norm (BatchNorm2d)" in result.out
    assert "and 1 more like it" in result.out
    assert "GroupNorm" in result.out
    assert "expected FLOPs" not in result.out


def test_mixing_is_refused_with_the_place(inspect, script):
    result = inspect(f"{script}:mixes")
    assert result.status == 3
    assert "the forward of model (Mixes) itself" in result.out
    assert "remedy" in result.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "no architecture"),
        (["{script}:missing"], "no function 'missing'"),
        (["{script}:breaks"], "no such key"),
        (["{script}:number"], "returned int"),
        (["{script}:raw"], "example_batch(batch_size)"),
        (["{script}:misfit"], "fails on this batch"),
        ([":factory"], "name both"),
        (["./x:f"], "imported"),
        (["{script}x:raw"], "script.pyx"),
        (["other.py:raw"], "no such file"),
        (["no.such.module:raw"], "No module named"),
        (["{folder}"], "config.json is missing"),
        (["gpt2", "--batch-size", "1"], "--batch-size is 1"),
        (["gpt2", "--sequence-length", "0"], "--sequence-length is 0"),
        (["gpt2", "--trainable", "["], "no regular expression"),
        (["gpt2", "--trainable", "zzz"], "matches none of the 28"),
        (["gpt2", "--full", "--sequence-length", "5000"], "at most 1024"),
        (["{script}:mlp", "--full"], "--full"),
        (["gpt2", "--strategy", "magic"], "invalid choice"),
        (["whisper"], "input_features"),
        ([], "MODEL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(inspect, script, words, said):
    assert_refused(inspect(*[word.format(script=script, folder=script.parent) for word in words]), said)


def test_memory_counts_the_state_of_the_optimizer_and_the_device(inspect, tmp_path):
    found, page, target = {}, {}, tmp_path / "found.json"
    for optimizer in ("adamw", "sgd"):
        words = ["--optimizer", optimizer, "--device-memory", 24, "--device-memory", "1GB", "--json", target]
        page[optimizer] = inspect("gpt2", "--full", "--sequence-length", 256, *words).out
        found[optimizer] = json.loads(target.read_text(encoding="utf-8"))["memory"]
    for said in ("state of adamw", "fits on 24 GB at physical batch ", "does not fit on 1 GB"):
        assert said in page["adamw"]
    weights = 4 * 124_439_808
    for optimizer, states in (("adamw", 2), ("sgd", 0)):
        memory = found[optimizer]
        assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (weights, weights, states * weights)
        assert memory["total"] == sum(
            memory[name] for name in ("parameters", "gradients", "optimizer", "activations", "clipping")
        )
        batch = memory["physical_batch"]["24000000000"]
        a_sample = (memory["activations"] + memory["clipping"]) / memory["batch_size"]
        fixed = memory["total"] - memory["batch_size"] * a_sample
        assert fixed + batch * a_sample <= 0.9 * 24e9 < fixed + (batch + 1) * a_sample
    assert found["adamw"]["physical_batch"]["1000000000"] == 0
