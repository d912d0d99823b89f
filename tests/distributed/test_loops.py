"""Loops on two ranks, as scripts have them: one training, exact to one sample at a time, every record once a draw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.loops import BATCH, BOUND, LOOPS, RATE, RECORDS, data, find, model
from tests.distributed.spawned import found_by_ranks
from tests.process_group import asked
from tests.reference import clip_and_sum, per_sample_gradients

pytestmark = pytest.mark.distributed
RANKS = 2


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the ranks did in each loop that this session looks at."""
    loops = asked(request, "loop")
    one, two = found_by_ranks(find, RANKS, tmp_path_factory.mktemp("loops"), loops, meshes=False)
    return dict(zip(loops, zip(one, two, strict=True), strict=True))


def clipped_sum(records, parameters):
    """The sum of clipped gradients of some records, one sample at a time."""
    net = model()
    net.load_state_dict(parameters, strict=False)
    _, x, y = data()[records]
    gradients = per_sample_gradients(
        net, {"x": x, "y": y}, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none"), axes={}
    )
    return clip_and_sum(gradients, BOUND).clipped


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: " ".join(f"{n}={v}" for n, v in loop._asdict().items()))
def test_two_ranks_make_one_exact_training(found, loop):
    one, two = found[loop]
    expected = BATCH * RANKS if loop.sampler else BATCH
    assert one["batch"] == two["batch"] == expected
    assert one["history"] == two["history"]
    assert not one["adds_up"], "torch's wrapper would send gradients of zero around"
    states = [[step["before"] for step in rank["steps"]] + [rank["after"]] for rank in (one, two)]
    assert len(states[0]) == len(states[1])
    for step, (mine, other) in enumerate(zip(one["steps"], two["steps"], strict=True)):
        records = sorted(mine["records"] + other["records"])
        assert len(set(records)) == len(records), "a record took part twice"
        backwards = max(1, len(mine["records"]), len(other["records"])) if loop.parts else 1
        assert mine["divisor"] == other["divisor"] == expected * backwards
        wanted = clipped_sum(records, mine["before"]) if records else {}
        for name, before in mine["before"].items():
            assert torch.equal(states[0][step + 1][name], states[1][step + 1][name]), "the ranks drift apart"
            moved = (before - states[0][step + 1][name]) / RATE * mine["divisor"]
            torch.testing.assert_close(moved, wanted.get(name, torch.zeros_like(moved)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if not loop.poisson])
def test_shuffled_passes_show_every_record_once_and_cost_one_participation_each(found, loop):
    one, two = found[loop]
    steps = len(one["steps"]) // 2
    assert steps == -(-RECORDS // int(one["batch"]))
    for start in (0, steps):
        shown = [n for rank in (one, two) for step in rank["steps"][start : start + steps] for n in step["records"]]
        assert sorted(shown) == list(range(RECORDS))
    assert one["history"] == [(0.0, 1.0, 2)]
    # One step's share of two passes may be the same by chance, all steps' will not.
    orders = [[step["records"] for step in one["steps"][start : start + steps]] for start in (0, steps)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop.poisson and not loop.parts])
def test_poisson_steps_are_accounted_at_the_rate_of_all_ranks(found, loop):
    one, _ = found[loop]
    assert one["history"] == [(0.0, one["batch"] / RECORDS, len(one["steps"]))]
