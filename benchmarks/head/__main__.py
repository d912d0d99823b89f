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
from benchmarks.memory import in_new_process, peaks
from ghostclip.kernels.head_norms import norm_flops

MEBIBYTE = 2**20
SMALL = Sizes(layers=1, width=32, vocabulary=300, positions=16, samples=2)


def _batch(sizes: Sizes) -> torch.Tensor:
    return torch.randint(sizes.vocabulary, (sizes.samples, sizes.positions), generator=torch.Generator().manual_seed(1))


def _memory(name: str, sizes: Sizes, *, tied: bool) -> dict[str, int]:
    """Return the peaks of steps in this process."""
    maker(name, SMALL, tied=tied)().step(_batch(SMALL))
    gc.collect()
    ids_BT = _batch(sizes)
    return peaks(maker(name, sizes, tied=tied)(), ids_BT, torch.device("cpu"))  # type: ignore[arg-type]


def _flops(name: str, sizes: Sizes, *, tied: bool) -> int:
    step, ids_BT = maker(name, sizes, tied=tied)(), _batch(sizes)
    step.step(ids_BT[:2])
    with counter() as counted:
        step.step(ids_BT)
    return counted.get_total_flops()


def _seconds(sizes: Sizes, rounds: int, *, tied: bool) -> dict[str, float]:
    """Return the CPU time of a step of every way, over that of an ordinary one: medians of interleaved rounds."""
    ids_BT = _batch(sizes)
    steps = {name: maker(name, sizes, tied=tied)() for name in WAYS}
    for step in steps.values():
        for _ in range(4):
            step.step(ids_BT)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, step in steps.items():
            begun = time.process_time()
            step.step(ids_BT)
            taken[name].append(time.process_time() - begun)
    base = taken["ordinary"]
    return {name: statistics.median(a / b for a, b in zip(own, base, strict=True)) for name, own in taken.items()}


def _text(report: dict[str, Any]) -> str:
    sizes = report["sizes"]
    lines = [
        "# A vocabulary head without logits",
        "",
        f"`{report['command']}`, {report['date'][:10]}: GPT of {sizes['layers']} layers, width {sizes['width']}, V "
        f"{sizes['vocabulary']}, {sizes['samples']} samples of {sizes['positions']} positions, float32, "
        f"{torch.get_num_threads()} thread(s); its logits would take {report['logits_mib']:.0f} MiB, the gradients of "
        "its parameters are part of what a step takes. Memory: peak resident size of later steps above that of the "
        "loaded model. The head's operations: in units of a product of hidden states and weight; the norm's share is "
        f"{report['norm']:.2f} of one. CPU time: over an ordinary step's, interleaved.",
        "",
        "| head | step | MiB | GFLOP | head's products | CPU time |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        where = "tied" if row["tied"] else "untied"
        if "memory_mib" not in row:
            lines.append(f"| {where} | {row['name']} | {row['problem']} | | | |")
            continue
        seconds = "" if row["time"] is None else f"{row['time']:.2f}×"
        lines.append(
            f"| {where} | {row['name']} | {row['memory_mib']:.0f} | {row['flops'] / 1e9:.0f} | "
            f"{row['products']:.2f} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def _rows(sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    rows = []
    unit = 2 * sizes.samples * sizes.positions * sizes.width * sizes.vocabulary
    for tied in (False, True):
        times = _seconds(sizes, rounds, tied=tied) if rounds else {}
        body = _flops("ordinary", sizes, tied=tied) - 3 * unit
        for name in WAYS:
            arguments = ["--one", name, *(["--tied"] if tied else []), "--sizes", json.dumps(asdict(sizes))]
            found = in_new_process("benchmarks.head", arguments, seconds=600)
            row: dict[str, Any] = {"name": name, "tied": tied, "problem": found.get("process_problem", "")}
            if "steady_bytes" in found:
                flops = _flops(name, sizes, tied=tied)
                row |= {
                    "memory_mib": (found["steady_bytes"] - found["loaded_bytes"]) / MEBIBYTE,
                    "first_mib": (found["peak_bytes"] - found["loaded_bytes"]) / MEBIBYTE,
                    "flops": flops,
                    "products": (flops - body) / unit,
                    "time": times.get(name),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, and write a report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing; 0 for none")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--tied", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine.exact_float32()
    if options.one:
        print(json.dumps(_memory(options.one, Sizes(**options.sizes), tied=options.tied)))
        return
    sizes, device = SMALL if options.quick else Sizes(), torch.device("cpu")
    arguments = ["--quick"] if options.quick else []
    report = files.head("python -m benchmarks.head", arguments, device, quick=options.quick)
    positions = sizes.samples * sizes.positions
    report |= {
        "sizes": asdict(sizes),
        "logits_mib": positions * sizes.vocabulary * 4 / MEBIBYTE,
        "norm": norm_flops(sizes.positions, sizes.width, sizes.vocabulary)
        / (2 * sizes.positions * sizes.width * sizes.vocabulary),
        "rows": _rows(sizes, options.rounds),
    }
    files.write(options.output, files.stem("head", device, quick=options.quick), report, _text(report))


if __name__ == "__main__":
    main()
