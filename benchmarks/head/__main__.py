"""Memory, operations and CPU time of a step with and without logits: `python -m benchmarks.head --help`."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import files, machine
from benchmarks.flops import counter
from benchmarks.head.ways import WAYS, Sizes, maker
from benchmarks.memory import FIRST_STEPS, in_new_process
from ghostclip._memory import PeakMemory
from ghostclip.kernels.head import norm_flops

MEBIBYTE = 2**20
TIED = ("ordinary", "book-keeping, no logits")
TIMED = ("ordinary", "ordinary, torch's linear_cross_entropy", "book-keeping, logits", "book-keeping, no logits")
LARGE = Sizes(layers=1, width=128, vocabulary=131072, positions=1024, samples=1)
SMALL = Sizes(layers=1, width=32, vocabulary=300, positions=16, samples=2)


def _batch(sizes: Sizes) -> torch.Tensor:
    return torch.randint(sizes.vocabulary, (sizes.samples, sizes.positions), generator=torch.Generator().manual_seed(1))


def _first_steps(sizes: Sizes) -> int:
    """Return how many steps come before one like all later ones: of one sample nothing is proved."""
    return FIRST_STEPS if sizes.samples > 1 else 1


def _one(name: str, sizes: Sizes, *, tied: bool) -> dict[str, int]:
    """Return what steps take in this process: the first ones, with their proofs, and a later one; and its FLOPs."""
    maker(name, SMALL, tied=tied)().step(_batch(SMALL))
    gc.collect()
    step, ids_BT, meter = maker(name, sizes, tied=tied)(), _batch(sizes), PeakMemory(torch.device("cpu"))
    gc.collect()
    meter.start()
    loaded = meter.in_use()
    for _ in range(_first_steps(sizes)):
        step.step(ids_BT)
    first = meter.stop() - loaded
    gc.collect()
    meter.start()
    step.step(ids_BT)
    later = meter.stop() - loaded
    with counter() as counted:
        step.step(ids_BT)
    return {"first_bytes": first, "later_bytes": later, "flops": counted.get_total_flops()}


def _seconds(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Return the CPU time of a step of some ways, over that of an ordinary one: medians of interleaved rounds."""
    ids_BT = _batch(sizes)
    steps = {name: maker(name, sizes, tied=False)() for name in TIMED}
    for step in steps.values():
        for _ in range(_first_steps(sizes)):
            step.step(ids_BT)
    taken: dict[str, list[float]] = {name: [] for name in TIMED}
    for _ in range(rounds):
        for name, step in steps.items():
            begun = time.process_time()
            step.step(ids_BT)
            taken[name].append(time.process_time() - begun)
    base = taken["ordinary"]
    return {name: statistics.median(a / b for a, b in zip(own, base, strict=True)) for name, own in taken.items()}


def _text(report: dict[str, Any]) -> str:
    sizes = report["sizes"]
    said = " CPU time: over an ordinary step's, interleaved." if report["times"] else ""
    timed = (" CPU time |", "---:|") if report["times"] else ("", "")
    lines = [
        "# A vocabulary head without logits",
        "",
        f"`{report['command']}`, {report['date']}: GPT of {sizes['layers']} layers, width {sizes['width']}, V "
        f"{sizes['vocabulary']}, {sizes['samples']} samples of {sizes['positions']} positions, float32, one thread of "
        f"{report['machine']['cpu']}; its logits would take {report['logits_mib']:.0f} MiB. Memory: peak resident size "
        "above that of the loaded model, the gradients of all parameters among it. Products: operations beyond those "
        "of the ordinary step's body, in units of one product of all hidden states and the head's weight; a norm is "
        f"{report['norm']:.2f} of one.{said}",
        "",
        f"| head | step | later steps, MiB | first steps, MiB | GFLOP | products |{timed[0]}",
        f"|---|---|---:|---:|---:|---:|{timed[1]}",
    ]
    body = {row["tied"]: row["flops"] - 3 * report["unit"] for row in report["rows"] if row["name"] == "ordinary"}
    for row in report["rows"]:
        where = "tied" if row["tied"] else "untied"
        if "flops" not in row:
            lines.append(f"| {where} | {row['name']} | {row.get('process_problem')} | | | |{' |' if timed[0] else ''}")
            continue
        taken = report["times"].get(row["name"]) if not row["tied"] else None
        lines.append(
            f"| {where} | {row['name']} | {row['later_bytes'] / MEBIBYTE:.0f} | {row['first_bytes'] / MEBIBYTE:.0f} "
            f"| {row['flops'] / 1e9:.0f} | {(row['flops'] - body[row['tied']]) / report['unit']:.2f} "
            + ("|" if not timed[0] else f"| {'' if taken is None else f'{taken:.2f}×'} |")
        )
    return "\n".join(lines) + "\n"


def _row(name: str, sizes: Sizes, *, tied: bool) -> dict[str, Any]:
    arguments = ["--one", name, *(["--tied"] if tied else []), "--sizes", json.dumps(asdict(sizes))]
    found = in_new_process("benchmarks.head", arguments, seconds=1200)
    return {"name": name, "tied": tied, **found}


def main() -> None:
    """Measure, and write a report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the timing; 0 for none")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--large", action="store_true", help="V 131,072 and T 1,024 on a small body, and fewer ways")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--tied", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine.exact_float32()
    if options.one:
        print(json.dumps(_one(options.one, Sizes(**options.sizes), tied=options.tied)))
        return
    sizes, device = SMALL if options.quick else LARGE if options.large else Sizes(), torch.device("cpu")
    arguments = ["--quick"] * options.quick + ["--large"] * options.large
    stem = files.stem("head-large" if options.large else "head", device, quick=options.quick)
    untied, tied_too = (TIMED, ()) if options.large else (tuple(WAYS), TIED)
    ways = [*((name, False) for name in untied), *((name, True) for name in tied_too)]
    report = files.head("benchmarks.head", arguments, device, quick=options.quick)
    unit = 2 * sizes.samples * sizes.positions * sizes.width * sizes.vocabulary
    report |= {
        "sizes": asdict(sizes),
        "logits_mib": sizes.samples * sizes.positions * sizes.vocabulary * 4 / MEBIBYTE,
        "unit": unit,
        "norm": norm_flops(sizes.positions, sizes.width, sizes.vocabulary) * sizes.samples / unit,
        "rows": [],
        "times": {},
    }
    for name, tied in ways:
        report["rows"].append(_row(name, sizes, tied=tied))
        print(json.dumps(report["rows"][-1]), flush=True)
        files.write(options.output, stem, report, _text(report))
    report["times"] = _seconds(sizes, options.rounds) if options.rounds else {}
    files.write(options.output, stem, report, _text(report))


if __name__ == "__main__":
    main()
