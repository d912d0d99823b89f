"""The place where samples start to mix is found, and nothing is blamed that keeps them apart."""

import pytest
import torch

import ghostclip
from ghostclip.errors import SampleMixingError
from ghostclip.evidence.dependence import dependence_start
from tests.cases import ALL_CASES
from tests.reference import batch_size
from tests.validation.mixers import KEEPS_APART, MIXERS, CentresOnTheBatch, inputs


def _start(model, x, axis=0):
    with torch.no_grad():
        return dependence_start(model, model, x, batch_size=x.shape[axis], axis=axis)


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
