"""Peak memory of every engine on one case, in a process of its own: `python -m paper_repro.memory --help`.

On a CPU only: on a GPU the allocator's own count is read during the trial step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import torch

from benchmarks.engines import Engine
from benchmarks.harness import exact_float32, in_new_process, tells_peaks
from ghostclip._memory import PeakMemory
from paper_repro.cases import Case, Size
from paper_repro.limits import SHARE_OF_FREE, cap, free_bytes, reason
from paper_repro.measure import MAX_GRAD_NORM
from paper_repro.tables import LETTERS, load

STEPS = 2


def _steps(engine: Engine, case: Case, device: torch.device) -> dict[str, Any]:
    try:
        batch = case.task.batch(device)
        runner = engine.attach(case.task.model(device), MAX_GRAD_NORM)
        meter = PeakMemory(device)
        gc.collect()
        meter.start()
        loaded = meter.in_use()
        for _ in range(STEPS):
            runner.step(batch)
    except Exception as problem:  # noqa: BLE001 - whatever an engine raises is a result
        return {"memory_problem": reason(problem)}
    return {"loaded_bytes": loaded, "peak_bytes": meter.stop()}


def _in_this_process(letter: str, size: Size, name: str, wanted: list[str]) -> dict[str, Any]:
    exact_float32()
    device = torch.device("cpu")
    table = load(letter, size)
    case = next(case for case in table.cases if case.task.name == name)
    tiny = next(other for other in load(letter, "tiny").cases if other.group == case.group)
    found = {}
    for engine in table.engines(False):
        if engine.name in wanted:
            # What is imported and planned at an engine's first step is not counted as its memory.
            _steps(engine, tiny, device)
            with cap(SHARE_OF_FREE * (free_bytes() or 0), device):
                found[engine.name] = _steps(engine, case, device)
            gc.collect()
    return found


def add_memory(letter: str, size: Size, case: Case, found: dict[str, Any]) -> None:
    """Add the peak memory of each engine that was timed.

    Args:
        letter: The table.
        size: How large its models are.
        case: The case.
        found: Its part of the report; its engines' rows gain `loaded_bytes` and `peak_bytes`, or `memory_problem`.
    """
    wanted = [row["name"] for row in found["engines"] if row["status"] == "ok"]
    if not wanted or not tells_peaks(torch.device("cpu")):
        return
    arguments = [letter, case.task.name, "--size", size, "--engines", *wanted]
    measured = in_new_process("paper_repro.memory", arguments)
    lost = {"memory_problem": measured["process_problem"]} if "process_problem" in measured else {}
    for row in found["engines"]:
        if row["name"] in wanted:
            row.update(measured.get(row["name"], lost))


def main() -> None:
    """Print the peaks as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m paper_repro.memory", description=__doc__)
    parser.add_argument("table", choices=LETTERS)
    parser.add_argument("case")
    parser.add_argument("--size", choices=("tiny", "small", "full"), default="small")
    parser.add_argument("--engines", nargs="+", required=True)
    options = parser.parse_args()
    found = _in_this_process(options.table, options.size, options.case, options.engines)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
