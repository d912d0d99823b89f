"""Measure the quality and the speed of noise: `python -m benchmarks.noise --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.noise import measure
from benchmarks.noise.draws import DRAWERS

RESULTS = Path(__file__).resolve().parents[1] / "results"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few draws: does it run, not what it says")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    return parser.parse_args()


def _table(report: Mapping[str, Any]) -> str:
    about = report["machine"]
    lines = [
        "# Noise\n",
        f"`{report['command']}`, {report['date']}: {about['cpu']}, one thread, torch {about['versions']['torch']}, "
        f"numpy {about['versions']['numpy']}. Speed is in CPU time. p is the chance of a result at least as far off "
        "if the values were independent and normal.\n",
        "| source | million a second | draws | beyond 5.768 σ (expected) | beyond 6 σ (expected) | largest "
        "| p of tails | p of χ² | p of variance | p of correlations |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        by_threshold = {tail["beyond"]: tail for tail in row["tails"]["rows"]}
        beyond = [f"{by_threshold[t]['count']} ({by_threshold[t]['expected']:.1f})" for t in (5.768, 6.0)]
        least = min(1.0, min(tail["p"] for tail in row["tails"]["rows"]) * len(by_threshold))
        cells = [row["title"], f"{row['speed']:.0f}", f"{row['tails']['draws']:.2g}", *beyond]
        cells += [f"{row['tails']['largest']:.2f}", f"{least:.2g}"]
        cells += [f"{p:.2g}" for p in (row["shape"]["chi2_p"], row["shape"]["variance_p"], row["correlations"]["p"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure every source and write the results.

    Returns:
        The exit status.
    """
    options = _options()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.noise", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine.describe(torch.device("cpu")),
        "rows": [],
    }
    for drawer in DRAWERS:
        print(drawer.title, flush=True)
        report["rows"].append(
            {
                "title": drawer.title,
                "speed": measure.speed(drawer.start(), 0.5 if options.quick else 5.0),
                "tails": measure.tails(drawer.start(), 2**23 if options.quick else drawer.draws),
                "shape": measure.shape(drawer.start(), 2**22 if options.quick else 2**27),
                "correlations": measure.correlations(drawer, 2**18 if options.quick else 2**23),
            }
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "noise.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.out / "noise.md").write_text(_table(report), encoding="utf-8")
    print(_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
