"""Fixtures of the exactness tests: strategies, no network, and torch's own warnings about its slow paths."""

import os
import zlib
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
    """Let torch's remarks on its slow paths pass, and mark what is thorough; the hook is shown every test.

    Of the tests that hold one case of the table in every strategy one is quick: another one for each case and test, so
    that the quick ones meet all strategies.
    """
    for item in items:
        if HERE not in item.path.parents:
            continue
        for rule in _TORCH_SAYS:
            item.add_marker(pytest.mark.filterwarnings(rule))
        given = item.callspec.params if hasattr(item, "callspec") else {}
        case = getattr(given.get("case"), "name", given.get("case"))
        if given.get("strategy") in STRATEGIES and isinstance(case, str):
            quick = STRATEGIES[zlib.crc32(f"{item.originalname} {case}".encode()) % len(STRATEGIES)]
            if given["strategy"] != quick:
                item.add_marker(pytest.mark.thorough)


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """Every strategy in turn."""
    return request.param
