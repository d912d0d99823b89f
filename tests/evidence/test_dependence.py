"""The place where samples start to mix is found, and nothing is blamed that keeps them apart."""

import pytest
import torch

import ghostclip
from ghostclip.errors import GhostClipError, SampleMixingError
from ghostclip.evidence.dependence import dependence_start, replaced, same_randomness
from tests.cases import ALL_CASES
from tests.reference import batch_size
from tests.validation.mixers import KEEPS_APART, MIXERS, CentresOnTheBatch, inputs


def _start(model, x, axis=0):
    with torch.no_grad():
        return dependence_start(model, model, x, batch_size=x.shape[axis], axis=axis)


def test_generators_that_are_not_put_back_are_left_alone(monkeypatch):
    """`torch.manual_seed` sets those of all GPUs; only those of a model's own are put back."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("set every GPU's generator"))
    before = torch.get_rng_state()
    with same_randomness([torch.ones(1)]):
        first = torch.rand(3)
    with same_randomness():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MIXERS)
def test_start_is_found(name):
    build, shape, path, said = MIXERS[name]
    start = _start(build(), inputs(shape))
    assert start is not None
    assert start.path == path
    assert said in start.describe()


@pytest.mark.parametrize("name", KEEPS_APART)
def test_nothing_is_blamed_that_keeps_samples_apart(name):
    build, shape = KEEPS_APART[name]
    assert _start(build(), inputs(shape)) is None


def test_batch_on_axis_1():
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
    assert _start(layer, inputs((7, 4, 6)), axis=1) is None
    assert _start(layer, inputs((7, 4, 6)), axis=0).path == "self_attn"


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if not case.refused and "transformers" not in case.tags], ids=lambda c: c.name
)
def test_no_case_of_the_table_is_blamed(case):
    model, batch = case.model(case.dtypes[0]), case.data(case.dtypes[0])
    with torch.no_grad():
        found = dependence_start(
            model,
            lambda moved: case.losses(model, moved),
            batch,
            batch_size=batch_size(batch, case.axes),
            axis=0 if case.batch_first else 1,
        )
    assert found is None, found.describe()


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "batch_norm"])
def test_refusal_in_training_names_the_place(name):
    build, shape, path, said = MIXERS[name]
    model = build()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        with pytest.raises(GhostClipError) as refusal:
            clipper.backward(model(inputs(shape)).flatten(1).square().mean(1))
    if isinstance(refusal.value, SampleMixingError):
        assert said in str(refusal.value)
        assert (path or "model") in str(refusal.value)
        assert "BatchNorm" not in str(refusal.value)


def test_refusal_leaves_buffers_and_randomness_alone():
    model = CentresOnTheBatch()
    model.register_buffer("count", torch.zeros(()))
    model.register_forward_hook(lambda module, args, output: module.count.add_(1) and None)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0):
        before = torch.get_rng_state()
        with pytest.raises(SampleMixingError):
            model(inputs((4, 5)))
        assert torch.equal(torch.get_rng_state(), before)
    # One forward of the user's own at most.
    assert model.count <= 1


def test_hooks_are_gone_afterwards():
    model = CentresOnTheBatch()
    _start(model, inputs((4, 5)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_replacing_a_sample_touches_that_sample_only():
    batch = {"x": inputs((4, 5)), "y": torch.arange(4), "shared": torch.ones(7, 7), "name": "a"}
    moved = replaced(batch, 3, batch_size=4, axis=0)
    assert torch.equal(moved["x"][:3], batch["x"][:3])
    assert torch.equal(moved["x"][3], batch["x"][0])
    assert moved["y"].tolist() == [0, 1, 2, 0]
    assert moved["shared"] is batch["shared"]
    assert batch["y"].tolist() == [0, 1, 2, 3]
