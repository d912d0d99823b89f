"""Architectures with views of memory and with experts: one graph, and exact."""

import pytest

from benchmarks.graph.table import row

pytest.importorskip("transformers")
from tests.architectures.known import ALL

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["SwinForImageClassification", "MixtralForCausalLM"])
def test_an_architecture_is_one_graph(name):
    (architecture,) = (one for one in ALL if one.name == name)
    found = row(architecture, 0)
    assert found["error"] < 1e-12
    assert found["norm_error"] < 1e-12
