"""The largest batch under a cap of memory, by doubling and halving: `python -m paper_repro.capacity --help`.

Each engine is tried in a process of its own, which holds no other model, and which sees the cap as the machine's end.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engines import Engine
from benchmarks.machine import exact_float32
from paper_repro.cases import Case, Size
from paper_repro.limits import cap, reason, short_of_memory
from paper_repro.measure import MAX_GRAD_NORM, say
from paper_repro.memory import in_new_process
from paper_repro.tables import LETTERS, load

GIB = 2**30
# A batch is said to be the largest when it is known to within this share, which saves steps nobody would miss.
PRECISION = 0.03


def largest(fits: Callable[[int], bool], *, most: int) -> int:
    """Find the largest batch that fits, if smaller ones do.

    Args:
        fits: Whether a number of samples does.
        most: Look no further.

    Returns:
        The number, to within 3 %; 0 if not even one fits.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, int(PRECISION * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _seconds_of_a_step(engine: Engine, case: Case, samples: int, device: torch.device) -> float:
    task = replace(case.task, batch_size=samples)
    batch = task.batch(device)
    runner = engine.attach(task.model(device), MAX_GRAD_NORM)
    runner.step(batch)
    started = time.perf_counter()
    runner.step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _search(engine: Engine, case: Case, device: torch.device, limit: float, *, most: int) -> dict[str, Any]:
    seconds: dict[int, float] = {}

    def fits(samples: int) -> bool:
        try:
            with cap(limit, device):
                seconds[samples] = _seconds_of_a_step(engine, case, samples, device)
        except Exception as problem:
            if not short_of_memory(problem):
                raise
            return False
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    try:
        found = largest(fits, most=most)
    except Exception as problem:  # noqa: BLE001 - whatever an engine raises is a result
        return {"capacity_problem": reason(problem)}
    result: dict[str, Any] = {"largest_batch": found, "largest_batch_is_limit": found >= most}
    if found:
        result["examples_per_second_at_largest"] = found / seconds[found]
    return result


def add_capacity(letter: str, size: Size, case: Case, found: dict[str, Any], given: dict[str, Any]) -> None:
    """Add the largest batch of each engine that was right.

    Args:
        letter: The table.
        size: How large its models are.
        case: The case.
        found: Its part of the report; its engines' rows gain `largest_batch`, or `capacity_problem`.
        given: `device`, `cap` in GiB and `most` samples.
    """
    for row in found["engines"]:
        # Out of memory at the batch that is timed is no reason not to look for a smaller one.
        if row["status"] != "ok" and row.get("problem") != "out of memory":
            continue
        arguments = [letter, case.task.name, str(row["name"]), "--size", size]
        for name, value in given.items():
            arguments += [f"--{name}", str(value)]
        measured = in_new_process("paper_repro.capacity", arguments)
        problem = measured.pop("process_problem", None)
        row.update({"capacity_problem": problem} if problem else measured)
        said = row.get("largest_batch", row.get("capacity_problem"))
        say(f"   {row['title']}: largest batch under {given['cap']} GiB: {said}")


def _tiny_like(case: Case, letter: str) -> Case:
    """The tiny case of the same model, or of the same family."""
    cases = load(letter, "tiny").cases
    family = case.group.split("-")[0]
    alike = [other for other in cases if other.group == case.group]
    return (alike or [other for other in cases if other.group.startswith(family)])[0]


def main() -> None:
    """Print the largest batch as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m paper_repro.capacity", description=__doc__)
    parser.add_argument("table", choices=LETTERS)
    parser.add_argument("case")
    parser.add_argument("engine")
    parser.add_argument("--size", choices=("tiny", "small", "full"), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cap", type=float, required=True, help="GiB")
    parser.add_argument("--most", type=int, default=4096, help="try no larger batch")
    options = parser.parse_args()
    exact_float32()
    device = torch.device(options.device)
    table = load(options.table, options.size)
    case = next(case for case in table.cases if case.task.name == options.case)
    engine = next(engine for engine in table.engines(False) if engine.name == options.engine)
    # Libraries that are loaded at the first step are not part of what the cap is for.
    _seconds_of_a_step(engine, _tiny_like(case, options.table), 2, device)
    result = _search(engine, case, device, options.cap * GIB, most=options.most)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
