"""Two processes that compute their sums by one graph each release what the eager engine does."""

import pytest
import torch

from tests.graph.ranks import run
from tests.process_group import asked, start_ranks

pytestmark = pytest.mark.distributed
RANKS = 2


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the ranks found, in their order, of what this session compares."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(run, RANKS, str(folder), asked(request, "wrapped"))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("wrapped", ["False", "True"], ids=["ranks of their own", "DistributedDataParallel"])
def test_ranks_train_as_the_eager_engine_does(found, wrapped):
    first = found[0][wrapped]["graph"]["parameters"]
    for rank in found:
        graph, eager = rank[wrapped]["graph"], rank[wrapped]["eager"]
        assert graph["runs"] > 2
        for one, two, other in zip(graph["parameters"], eager["parameters"], first, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
