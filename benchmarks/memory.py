"""Peak memory of a few steps of one engine, in a process of its own: `python -m benchmarks.memory --help`.

On a CPU it is the peak resident set above that of the process with the model and the batch loaded; on a GPU the same by
the caching allocator's own count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.engines import Engine, engines
from benchmarks.machine import exact_float32
from benchmarks.tasks import Task, tasks

STEPS = 3
# Freed blocks go back to the system at once, so that the resident set is what is alive and not what glibc keeps.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def resident(field: str) -> int:
    """Read what this process holds; where Linux's table is missing, the C library's peak serves for every field.

    Args:
        field: "VmRSS" (resident now), "VmHWM" (the most so far) or another size of `/proc/self/status`.

    Returns:
        Bytes.
    """
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(rf"^{field}:\s*(\d+) kB$", status.read_text(), flags=re.MULTILINE)
        if match:
            return int(match.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _task(name: str, *, quick: bool) -> Task:
    return next(task for task in tasks(quick=quick) if task.name == name)


def _load_what_a_step_loads(engine: Engine, small: Task, device: torch.device) -> None:
    """Make a step on a small model, so that modules imported at the first step are not counted as its memory."""
    engine.attach(small.model(device), 1.0).step(small.batch(device))


def _steps_in_this_process(task_name: str, engine_name: str, device: torch.device, *, quick: bool) -> dict[str, int]:
    exact_float32()
    engine = next(engine for engine in engines() if engine.name == engine_name)
    _load_what_a_step_loads(engine, _task(task_name, quick=True), device)
    task = _task(task_name, quick=quick)
    batch = task.batch(device)
    runner = engine.attach(task.model(device), 1.0)
    if device.type == "cuda":
        loaded = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        loaded = resident("VmRSS")
    for _ in range(STEPS):
        runner.step(batch)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")
    return {"loaded_bytes": loaded, "peak_bytes": peak}


def measure(task_name: str, engine_name: str, device: torch.device, *, quick: bool) -> dict[str, int]:
    """Measure in a new process.

    Args:
        task_name: One of the tasks' names.
        engine_name: One of the engines' names.
        device: Where it runs.
        quick: Whether the small tasks are meant.

    Returns:
        `loaded_bytes`, before the first step, and `peak_bytes`.
    """
    command = [sys.executable, "-m", "benchmarks.memory", task_name, engine_name, "--device", str(device)]
    done = subprocess.run(
        [*command, "--quick"] if quick else command,
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run a few steps and print what they took as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("task")
    parser.add_argument("engine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(
        json.dumps(
            _steps_in_this_process(options.task, options.engine, torch.device(options.device), quick=options.quick)
        )
    )


if __name__ == "__main__":
    main()
