"""Stage 3: kernels beside their twins, and noise of every level, on the device: what may be switched on?

16-bit types come first. A kernel may be switched on for a type where it is right on every shape that was tried and
takes less time than its twin on most.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from functools import partial

import torch

from benchmarks.gpu.kernels import cases, measure
from benchmarks.gpu.rows import Job, Row, started
from benchmarks.timing import seconds
from ghostclip.kernels import runtime
from ghostclip.noise import make_noise_source

LEVELS = ("fast", "secure")
ROUNDS = 10


def _noise(job: Job) -> None:
    """Time and moments of added noise; of that many values, what is beyond six deviations of a moment is no chance."""
    count = 1 << 14 if job.quick else 1 << 26
    for level in LEVELS:
        # Secure noise that is drawn on the host takes ten seconds for so many.
        drawn = count if level == "fast" else min(count, 1 << 23)
        with job.case(f"{level} noise, {drawn:,} values") as row:
            source = make_noise_source(level=level)
            part_N = torch.zeros(drawn, device=job.device)
            source.add_(part_N, 2.0)
            wide_N = part_N.double() / 2
            row["mean"], row["variance"] = float(wide_N.mean()), float(wide_N.var())
            row["seconds"] = seconds(partial(source.add_, part_N, 2.0), job.device, rounds=3)
            right = abs(row["mean"]) < 6 / math.sqrt(drawn) and abs(row["variance"] - 1) < 6 * math.sqrt(2 / drawn)
            row["status"] = "ok" if right else "wrong"


def _kernels(job: Job) -> None:
    if not runtime.runs_on(job.device):
        why = "Triton is not installed" if not runtime.installed() else "Triton runs on GPUs"
        job.write({"case": "kernels", "status": "cannot", "problem": why})
        return
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for case in cases(quick=job.quick):
        name = f"{case.kernel.name}, {str(case.dtype)[6:]}"
        with job.case(f"{name}, {case.title}") as row:
            row |= {"kernel": name, **measure(case, job.device, rounds=ROUNDS)}
        found[name].append(row)
        job.write(verdict(name, found[name]))


def verdict(name: str, rows: list[Row]) -> Row:
    """Whether a kernel may be switched on for a type."""
    statuses = {row["status"] for row in rows}
    quicker = [row["speed_up"] for row in rows if "speed_up" in row]
    pays = sum(gain > 1 for gain in quicker) * 2 > len(rows)
    answer = "may be switched on" if pays else "right, leave off: no gain shown"
    if statuses != {"ok"}:
        answer = "leave off: wrong" if "wrong" in statuses else "leave off: failed"
    speed_up = math.prod(quicker) ** (1 / len(quicker)) if quicker else None
    return {"case": f"verdict: {name}", "status": "ok", "verdict": answer, "shapes": len(rows), "speed_up": speed_up}


def main(given: list[str] | None = None) -> int:
    """Compare, and write a row for every comparison."""
    job = started("benchmarks.gpu.twins", __doc__, given=given)
    _noise(job)
    _kernels(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
