"""Compiled graphs on disk: found where all that made them is equal, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ghostclip import _torch
from ghostclip.clipping.bounds import Flat
from ghostclip.clipping.policies import ClipPolicy, per_layer
from ghostclip.graph import GraphOptions, compiled
from tests.graph.steps import Net, batch, eager_sums, losses, net, step_of

KEPT = GraphOptions()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor" / "ghostclip"


@pytest.fixture
def key_of(monkeypatch):
    """The key of a step, for which nothing is compiled; None where it has none."""
    keys = []

    def found(place):
        keys.append(place.key)
        return lambda *tensors: ()

    monkeypatch.setattr(compiled.CacheEntry, "load", found)

    def key(model, *, samples=6, dtype=torch.float64, **options):
        step = step_of(model, **{"options": KEPT, **options})
        x, y = batch(samples, dtype)
        graph = step._step_for(((x, y), {}), samples)
        assert not isinstance(graph, str), graph
        return keys.pop() if keys else None

    return key


class Scaled(Net):
    def __init__(self, constant):
        super().__init__()
        self.constant = constant

    def forward(self, x):
        return super().forward(x) * self.constant


def scaled(constant):
    torch.manual_seed(1)
    return Scaled(constant).double()


def test_weights_and_data_are_not_part_of_the_key(key_of):
    torch.manual_seed(2)
    assert key_of(net()) == key_of(Net().double())


def test_a_key_follows_constants_of_the_model(key_of):
    tensors = [key_of(scaled(torch.tensor([1.0, 2.0, constant]))) for constant in (3.0, 4.0, 3.0)]
    numbers = [key_of(scaled(constant)) for constant in (2.0, 3.0, 2.0)]
    assert tensors[0] == tensors[2]
    assert numbers[0] == numbers[2]
    assert len({*tensors, *numbers, key_of(net())}) == 5


def test_a_key_follows_clipping(key_of):
    keys = {key_of(net()), key_of(net(), max_grad_norm=0.4), key_of(net(), max_grad_norm=None, policy=per_layer(0.3))}
    assert len(keys) == 3


def test_a_key_follows_batch_dtype_and_what_trains(key_of):
    frozen = net()
    frozen.first.weight.requires_grad_(False)
    keys = {key_of(net()), key_of(net(), samples=7), key_of(net().float(), dtype=torch.float32), key_of(frozen)}
    assert len(keys) == 4


def test_a_key_follows_options_and_settings(key_of, monkeypatch):
    from torch._inductor import config

    keys = {key_of(net()), key_of(net(), options=GraphOptions(mode="max-autotune-no-cudagraphs"))}
    with config.patch(max_fusion_size=7):
        keys.add(key_of(net()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.add(key_of(net()))
    monkeypatch.setattr(torch, "__version__", "2.99")
    keys.add(key_of(net()))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
        keys.add(key_of(net()))
    assert len(keys) == 6


def test_a_key_follows_the_sources_of_the_package(key_of, tmp_path, monkeypatch):
    source = tmp_path / "package" / "part" / "module.py"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(compiled, "SOURCES", tmp_path / "package")

    def written(text):
        source.write_text(text)
        os.utime(source, ns=(compiled.BEGUN - 1, compiled.BEGUN - 1))
        return key_of(net())

    keys = {written("x = 1"), written("x = 2")}
    assert len(keys) == 2
    assert written("x = 1") in keys
    source.rename(source.with_name("other.py"))
    assert key_of(net()) not in keys


class Own(Flat):
    """A rule that others may write otherwise under the same name."""


def _with_a_tensor():
    policy = ClipPolicy(0.3)
    policy.weights = torch.ones(2)
    return policy


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": None, "policy": ClipPolicy(0.3, rule=Own())},
        {"max_grad_norm": None, "policy": _with_a_tensor()},
        {"options": GraphOptions(backend="aten")},
        {"options": GraphOptions(cache=False, backend="inductor")},
        {"options": GraphOptions(mode="reduce-overhead")},
    ],
)
def test_what_is_not_known_to_be_equal_elsewhere_is_not_looked_for(key_of, options, monkeypatch):
    monkeypatch.setattr(_torch, "compiled", lambda *_: lambda *tensors: ())
    monkeypatch.setattr(compiled.CacheEntry, "save", lambda *_: pytest.fail("kept"))
    assert key_of(net(), **options) is None


def test_a_loss_that_is_divided_by_the_number_of_samples_is_refused_where_its_graph_is_kept(key_of):
    def of_constant(model, x, y):
        return losses(model, x, y) / 6

    def of_batch(model, x, y):
        return losses(model, x, y) / len(x)

    assert key_of(net(), loss=of_constant)
    step = step_of(net(), loss=of_batch, options=KEPT)
    assert "it follows B" in step._step_for((batch(6), {}), 6)


SECOND = """
import sys, torch
from tests.graph.steps import batch, net, step_of, sums
import ghostclip
model = net()
step = step_of(model, options=ghostclip.GraphOptions())
step(*batch(seed=5))
step.clipper.reset()
step(*batch())
assert step.graphs[0].verified and not step.reasons, step.reasons
torch.save((step.graphs[0].graph is None, sums(model)), sys.argv[1])
"""


def _in_new_process(path):
    subprocess.run(
        [sys.executable, "-c", SECOND, str(path)], check=True, cwd=Path(__file__).parents[2], env={**os.environ}
    )
    return torch.load(path)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_another_process_finds_the_same_step_to_the_bit(folder, tmp_path):
    # Settings that other tests have left in this process would be another key.
    was_found, ours = _in_new_process(tmp_path / "first")
    assert not was_found
    assert len(list(folder.iterdir())) == 1
    was_found, theirs = _in_new_process(tmp_path / "second")
    assert was_found
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(theirs, eager_sums(net(), *batch())[0], rtol=1e-10, atol=1e-13)


def test_a_file_whose_content_does_not_fit_its_name_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(_torch, "load_compiled", lambda path: path)
    folder.mkdir(parents=True)
    kept = folder / f"key-{compiled._hash(b'graph')}"
    kept.write_bytes(b"graph")
    kept.with_name("key-foreign").write_bytes(b"no compiled graph")
    assert compiled.CacheEntry(folder, "key").load() == kept
    kept.write_bytes(b"grape")
    assert compiled.CacheEntry(folder, "key").load() is None
