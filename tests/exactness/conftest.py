"""Fixtures of the exactness tests: strategies, no network, and torch's own warnings about its slow paths."""

import os
from pathlib import Path

import pytest

from tests.exactness.runs import STRATEGIES

HERE = Path(__file__).parent
# transformers builds from configs only; should anything ask for a file, it is not to be looked for.
os.environ["HF_HUB_OFFLINE"] = "1"

_TORCH_SAYS = (
    "ignore:Using padding='same' with even kernel lengths:UserWarning",
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning",
)


def pytest_collection_modifyitems(items):
    """Let torch's remarks on its slow paths pass, in this folder only: the hook is shown every test."""
    for item in items:
        for rule in _TORCH_SAYS if HERE in item.path.parents else ():
            item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """Every strategy in turn."""
    return request.param
