"""Peak memory of a few steps of one engine, in a process of its own: `python -m benchmarks.memory --help`.

On a CPU it is the peak resident set above that of the process with the model and the batch loaded; on a GPU the same by
the caching allocator's own count. Two peaks are read: that of the first steps, in which an engine finds out what it
needs to know of a model, and that of later ones.
"""

from __future__ import annotations

import argparse
import gc
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from benchmarks.engines import CannotDo, Engine, Runner
from benchmarks.harness import exact_float32, in_new_process, tells_peaks
from benchmarks.peers import every_engine
from benchmarks.tasks import Batch, Task, find
from ghostclip._memory import PeakMemory

# The fourth is proved as the first is.
FIRST_STEPS = 4
LATER_STEPS = 4
# An engine that is not done by then has no figure for memory.
SECONDS = 400.0
_FIRST_TO_GO = Path("/proc/self/oom_score_adj")


@runtime_checkable
class Prepares(Protocol):
    """A runner that compiles before its first step."""

    def prepare(self, batch: Batch) -> None:
        """Do what is done once for all steps on such a batch."""


def load_what_a_step_loads(engine: Engine, small: Task, device: torch.device) -> None:
    """Make a step on a small model, so that what is imported at the first step is not counted as its memory."""
    engine.attach(small.model(device), 1.0).step(small.batch(device))
    gc.collect()


def peaks(runner: Runner, batch: Batch, device: torch.device) -> dict[str, int]:
    """Make first and later steps."""
    if isinstance(runner, Prepares):
        runner.prepare(batch)
        if device.type == "cpu":
            return {}
    meter = PeakMemory(device)
    gc.collect()
    meter.start()
    loaded = meter.in_use()
    for _ in range(FIRST_STEPS):
        runner.step(batch)
    found = {"loaded_bytes": loaded, "peak_bytes": meter.stop()}
    if tells_peaks(device):
        gc.collect()
        meter.start()
        for _ in range(LATER_STEPS):
            runner.step(batch)
        found["steady_bytes"] = meter.stop()
    return found


def _in_this_process(task: Task, small: Task, engine: Engine, device: torch.device) -> dict[str, int]:
    exact_float32()
    load_what_a_step_loads(engine, small, device)
    batch = task.batch(device)
    return peaks(engine.attach(task.model(device), 1.0), batch, device)


def give_way() -> None:
    """Let a system that is out of memory end this process, and not the one that waits for it and writes the report."""
    with suppress(OSError):
        _FIRST_TO_GO.write_text("1000", encoding="ascii")


def measure(
    task_name: str, engine_name: str, device: torch.device, *, quick: bool, seconds: float = SECONDS
) -> dict[str, Any]:
    """Measure in a new process."""
    arguments = [task_name, engine_name, "--device", str(device)]
    return in_new_process("benchmarks.memory", [*arguments, "--quick"] if quick else arguments, seconds=seconds)


def main() -> None:
    """Run a few steps and print what they took as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("task")
    parser.add_argument("engine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batch-size", type=int, help="samples (default: the task's own)")
    options = parser.parse_args()
    task = find(options.task, quick=options.quick)
    if options.batch_size:
        task = replace(task, batch_size=options.batch_size)
    engine = next(engine for engine in every_engine() if engine.name == options.engine)
    small = find(options.task, quick=True)
    give_way()
    try:
        found: dict[str, Any] = _in_this_process(task, small, engine, torch.device(options.device))
    except CannotDo as problem:
        found = {"cannot": str(problem)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
