"""The place where samples start to mix is found, and nothing is blamed that keeps them apart."""

import pytest
import torch

from ghostclip.checks.dependence import dependence_start
from tests.cases import ALL_CASES
from tests.reference import batch_size
from tests.validation.mixers import inputs


def _start(model, x, axis=0):
    with torch.no_grad():
        return dependence_start(model, model, x, batch_size=x.shape[axis], axis=axis)


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
