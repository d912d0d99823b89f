"""The largest batch under a cap of memory: `python -m paper_repro.capacity --help`.

The engines of a case are tried in a process that holds no other model, one after the other, and each sees the cap as
the machine's end. On a CPU each has a process of its own: where memory ran out once, oneDNN may fail ever after to make
what there is room for.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.engines import Engine
from benchmarks.harness import exact_float32, in_new_process, short_of_memory, tells_peaks
from ghostclip._memory import PeakMemory
from paper_repro.cases import Case, Size
from paper_repro.limits import cap, reason
from paper_repro.measure import MAX_GRAD_NORM, say
from paper_repro.tables import LETTERS, load

GIB = 2**30
# Two steps: what the first leaves behind, the second has to live with.
STEPS = 2
# While memory is not known, a batch that fits is followed by one so many times as large.
FIRST_STEPS = 4
# A line has two points; guesses along it that do not close in are given up.
POINTS = 2
GUESSES = 6
# A batch is said to be the largest when it is known to within this share, which saves steps nobody would miss.
PRECISION = 0.03


def _foreseen(used: dict[int, int], limit: float) -> int | None:
    """The batch whose memory reaches the limit, on the line through the two largest that fit."""
    if len(used) < POINTS:
        return None
    (small, low), (large, high) = sorted(used.items())[-POINTS:]
    return large + int((limit - high) * (large - small) / (high - low)) if high > low else None


def largest(fits: Callable[[int], int | None], *, most: int, limit: float = 0.0) -> int:
    """Find the largest batch that fits, if smaller ones do.

    Memory grows in a straight line with the batch, so after two batches the next one is the one foreseen to be the
    largest. Where that is off, or memory is not known, halving goes on.

    Args:
        fits: The bytes that a number of samples takes, 0 if they are not known; None if it does not fit.
        most: Look no further.
        limit: Bytes there are; 0 if they are not known.

    Returns:
        The number, to within 3 %; 0 if not even one fits.
    """
    used: dict[int, int] = {}
    low, high, guesses = 0, most + 1, 0
    while high - low > max(1, int(PRECISION * low)):
        middle = (low + high) // 2 if high <= most else max(1, FIRST_STEPS * low)
        foreseen = _foreseen(used, limit) if limit and guesses < GUESSES else None
        if foreseen is not None:
            guesses += 1
            # On its other side lies the next guess, so that two of them close the gap.
            middle = foreseen if guesses % 2 else int(foreseen * (1 + PRECISION)) + 1
        middle = min(max(middle, low + 1), high - 1)
        taken = fits(middle)
        if taken is None:
            high = middle
        else:
            low = middle
            if taken:
                used[middle] = taken
    return low


def _step(engine: Engine, case: Case, samples: int, device: torch.device, *, steps: int) -> float:
    """Seconds of the last of some first steps."""
    task = replace(case.task, batch_size=samples)
    batch = task.batch(device)
    runner = engine.attach(task.model(device), MAX_GRAD_NORM)
    seconds = 0.0
    for _ in range(steps):
        started = time.perf_counter()
        runner.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return seconds


def _search(engine: Engine, case: Case, device: torch.device, limit: float, *, most: int) -> dict[str, Any]:
    seconds: dict[int, float] = {}
    meter = PeakMemory(device)

    def fits(samples: int) -> int | None:
        try:
            gc.collect()
            meter.start()
            before = meter.in_use()
            with cap(limit, device):
                seconds[samples] = _step(engine, case, samples, device, steps=STEPS)
            return meter.stop() - (before if device.type == "cpu" else 0) if tells_peaks(device) else 0
        except Exception as problem:
            if not short_of_memory(problem):
                raise
            return None
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    try:
        found = largest(fits, most=most, limit=limit)
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
    # Out of memory at the batch that is timed is no reason not to look for a smaller one.
    rows = [row for row in found["engines"] if row["status"] in ("ok", "slow") or row.get("problem") == "out of memory"]
    if not rows:
        return
    arguments = [letter, case.task.name, "--size", size]
    for name, value in given.items():
        arguments += [f"--{name}", str(value)]
    measured = in_new_process("paper_repro.capacity", [*arguments, "--engines", *[str(row["name"]) for row in rows]])
    for row in rows:
        problem = measured.get("process_problem")
        row.update({"capacity_problem": problem} if problem else measured[row["name"]])
        said = row.get("largest_batch", row.get("capacity_problem"))
        say(f"   {row['title']}: largest batch under {given['cap']} GiB: {said}")


def _fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Work in a copy of this process, which must not have started threads; a new one would import everything again."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, work))
    child.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        found = {"capacity_problem": "the process died, most likely for lack of memory"}
    child.join()
    return found


def _send(sender: Connection, work: Callable[[], dict[str, Any]]) -> None:
    sender.send(work())


def _alone(engine: Engine, case: Case, small: Case, device: torch.device, limit: float, *, most: int) -> dict[str, Any]:
    # Libraries that are loaded at the first step are not part of what the cap is for.
    with contextlib.suppress(Exception):
        _step(engine, small, 2, device, steps=1)
    gc.collect()
    return _search(engine, case, device, limit, most=most)


def _tiny_like(case: Case, letter: str) -> Case:
    """The tiny case of the same model, or of the same family."""
    cases = load(letter, "tiny").cases
    family = case.group.split("-")[0]
    alike = [other for other in cases if other.group == case.group]
    return (alike or [other for other in cases if other.group.startswith(family)])[0]


def main() -> None:
    """Print the largest batch of each engine as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m paper_repro.capacity", description=__doc__)
    parser.add_argument("table", choices=LETTERS)
    parser.add_argument("case")
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--size", choices=("tiny", "small", "full"), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cap", type=float, required=True, help="GiB")
    parser.add_argument("--most", type=int, default=4096, help="try no larger batch")
    options = parser.parse_args()
    exact_float32()
    device = torch.device(options.device)
    table = load(options.table, options.size)
    case = next(case for case in table.cases if case.task.name == options.case)
    small = _tiny_like(case, options.table)
    found = {}
    for engine in table.engines(False):
        if engine.name in options.engines:
            work = partial(_alone, engine, case, small, device, options.cap * GIB, most=options.most)
            if device.type == "cpu":
                with contextlib.suppress(Exception):
                    # Imports what takes seconds; a model this small computes nothing in threads.
                    engine.attach(small.task.model(device), MAX_GRAD_NORM)
                found[engine.name] = _fork(work)
            else:
                found[engine.name] = work()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
