"""Random programs between a loader and `backward()`: what is known of them, and that none of a few gets through."""

from __future__ import annotations

import pytest

from benchmarks.harness import head
from benchmarks.loops.programs import Program, programs, try_programs

KNOWN = {
    "F.cross_entropy(model(x), y)": "mean",
    "F.cross_entropy(model(x), y, reduction='sum')": "sum",
    "F.cross_entropy(model(x - x.mean(0)), y)": "",
    "(F.cross_entropy(model(x), y, reduction='none') * (y == y[0])).mean()": "",
    "F.cross_entropy(model(x), y).square()": "",
}


@pytest.mark.parametrize("loss", KNOWN)
def test_autograd_tells_whether_records_are_kept_apart(loss):
    assert Program((f"return {loss}",)).keeps_apart() == KNOWN[loss]


def test_one_seed_writes_the_same_programs():
    assert list(programs(20, seed=3)) == list(programs(20, seed=3)) != list(programs(20, seed=4))


@pytest.mark.filterwarnings("ignore")
def test_none_of_a_few_gets_through(tmp_path):
    report = head("benchmarks.loops", []) | {"hosts": {"torch": ""}}
    assert try_programs(report, 8, seed=5, out=tmp_path, say=lambda line: None) == 0
    assert {row["outcome"] for row in report["programs"]} >= {"exact", "refused"}
