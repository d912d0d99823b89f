"""A step on a GPU is counted without one: launches, host reads, memory and predicted time of small models."""

from dataclasses import replace

import pytest

from benchmarks.gpu.counted import WAYS, count
from benchmarks.gpu.models import Conv1D, large_models
from ghostclip.clipping import joint
from ghostclip.factors import outer
from ghostclip.kernels import PositionSum

pytest.importorskip("transformers")
OURS = ("_gram", "_square", "_weighted_sum", "_norm_affine", "_row_squares")
CASES = [replace(case, task=case.quick) for case in large_models()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_counted(case, monkeypatch):
    # These layers stand for large ones, of which none is put together with another.
    monkeypatch.setattr(joint, "_SMALL_ON_A_GPU", 0)
    found = {way: count(case, way[0], samples=3, by_kernels=way[1]) for way in WAYS}
    base = found["ordinary", False]
    for (engine, by_kernels), row in found.items():
        assert row.kernels.total() >= base.kernels.total()
        assert row.seconds["products of 16 bits"] >= base.seconds["products of 16 bits"] > 0
        assert row.peak > sum(parameter.nbytes for parameter in case.task.make_model().parameters())
        assert (row.kernels["bmm"] > 0) or by_kernels or engine == "ordinary"
        ours = {name: count for name, count in row.kernels.items() if name.startswith("_") and name in OURS}
        assert bool(ours) is by_kernels
        # The one question whether all norms are certain.
        assert row.reads <= base.reads + (engine != "ordinary")


def test_with_kernels_a_layer_costs_one_launch_for_its_norm_and_one_for_its_sum(monkeypatch):
    monkeypatch.setattr(joint, "_SMALL_ON_A_GPU", 0)
    case = CASES[0]
    weights = sum(isinstance(module, Conv1D) for module in case.task.make_model().modules())
    found = count(case, "bookkeeping", samples=3, by_kernels=True)
    # The head's weight is one more.
    assert found.kernels["_gram"] + found.kernels["_square"] == weights + 1
    assert found.kernels["_weighted_sum"] == weights + 1
    assert 0 < found.own_products < found.seconds["products of 16 bits"]


def test_with_kernels_the_gradient_of_a_bias_comes_with_the_norm_of_its_layer(monkeypatch):
    monkeypatch.setattr(joint, "_SMALL_ON_A_GPU", 0)
    # As for layers as wide as they are on a GPU.
    monkeypatch.setattr(outer, "prefers_gram", lambda *sizes, **by: True)
    left, value = [], PositionSum.value

    def asked(self):
        left.append(self._sum_NF is not None)
        return value(self)

    monkeypatch.setattr(PositionSum, "value", asked)
    found = count(CASES[0], "bookkeeping", samples=3, by_kernels=True)
    # Of two steps; the head has no bias.
    assert len(left) == 2 * (found.kernels["_gram"] - 1) > 0
    assert all(left)
