"""The largest batch is found from few peaks, whatever shape memory has."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import capacity, memory
from benchmarks.search import PRECISION, largest
from benchmarks.tasks import find

CPU = torch.device("cpu")
# Bytes of a number of samples, the cap, and the largest number that is within it (of at most 4096).
SHAPES = {
    "line": (lambda number: 100 + 10 * number, 1000, 90),
    "square": (lambda number: number**2, 5000, 70),
    "flat": (lambda number: 5, 10, 4096),
    "not one": (lambda number: 2000, 10, 0),
    "steps": (lambda number: 50 * math.ceil(number / 8), 777, 120),
    "refused": (lambda number: 10 * number if number < 50 else math.inf, 1e6, 49),
    "one": (lambda number: number, 1, 1),
}


@pytest.mark.parametrize("first", [1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_largest_is_the_largest(shape, first):
    peak_of, cap, right = SHAPES[shape]
    found, peaks, whole = largest(peak_of, cap, most=4096, first=first)
    assert peaks == {number: peak_of(number) for number in peaks}
    assert found <= right <= found * (1 + PRECISION)
    assert found == 0 or peaks[found] <= cap
    assert len(peaks) <= 14
    assert whole


def test_the_next_number_is_ruled_out_by_measuring_it():
    found, peaks, _ = largest(lambda number: 100 + 10 * number, 300, most=4096)
    assert (found, 21 in peaks) == (20, True)


def test_a_line_takes_few_probes():
    _, peaks, _ = largest(lambda number: 3e6 + 1e6 * number, 512e6, most=4096)
    assert len(peaks) <= 7


def test_a_search_whose_time_is_over_gives_what_fits():
    left = iter([True, True, False])
    found, peaks, whole = largest(lambda number: number, 100, most=4096, go_on=lambda: next(left))
    assert (found, whole, len(peaks)) == (max(peaks), False, 3)
    assert found <= 100


def test_an_engine_is_searched_by_what_its_steps_take(monkeypatch):
    taken, steps = {"peak": 0}, []
    monkeypatch.setattr(capacity.PeakMemory, "in_use", lambda self: 1000)
    monkeypatch.setattr(capacity.PeakMemory, "stop", lambda self: taken["peak"])

    class Runner:
        def __init__(self, model, max_grad_norm):
            pass

        def step(self, batch):
            steps.append(len(batch[1]))
            taken["peak"] = 1000 + 10 * len(batch[1])

    engine = capacity.Engine("x", "X", False, Runner)
    found = capacity.search(engine, find("mlp", quick=True), CPU, capacity.Bounds(205, 64, seconds=float("inf")))
    assert found["largest_batch"] == 20
    assert not found["largest_batch_is_limit"]
    assert found["peaks"]["20"] == 200
    assert found["samples_per_second"] > 0
    # The last ones, of which the first is not timed.
    assert steps[-1 - capacity.TIMED_STEPS :] == [20] * (1 + capacity.TIMED_STEPS)


MEASURED = """
import torch
from benchmarks import capacity
from benchmarks.engines import NON_PRIVATE
from benchmarks.tasks import find
probe = capacity.Probe(NON_PRIVATE, find("cnn", quick=True), torch.device("cpu"))
few = probe(1)
print(probe(512) - few)
"""


def test_more_samples_take_more_memory():
    """The real measure, in a process of its own: the C library keeps what earlier tests have freed."""
    environment = {**os.environ, **memory.ENVIRONMENT, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", MEASURED], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 2**20
