"""Floating-point operations of a step, counted and not estimated."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engines import Runner
from benchmarks.tasks import Batch


def count(runner: Runner, batch: Batch) -> int:
    """Count the operations of matrix products and convolutions in one step.

    Args:
        runner: An engine at work; it should have made a step already, so that planning is not counted.
        batch: Given to it.

    Returns:
        Floating-point operations, a multiplication and an addition as two.
    """
    with FlopCounterMode(display=False) as counter:
        runner.step(batch)
    return counter.get_total_flops()
