"""Measure every kernel beside its twin on a GPU: `python -m benchmarks.kernels --help`."""

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
from benchmarks.kernels.cases import cases
from benchmarks.kernels.measure import measure
from benchmarks.report import machine_line
from ghostclip.kernels import runtime

RESULTS = Path(__file__).resolve().parents[1] / "results"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small problems: is it right, not how fast")
    parser.add_argument("--kernel", action="append", help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=30, help="timings of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args()
    if not runtime.installed():
        parser.error("Triton is not installed (pip install triton): there are no kernels to measure.")
    if not torch.cuda.is_available() and not (options.quick and runtime.interpreted()):
        parser.error(
            "no CUDA device. On a CPU, TRITON_INTERPRET=1 with --quick checks the kernels without timing them."
        )
    return options


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["status"] == "failed":
        return [f"failed: {row['problem'].splitlines()[0][:60]}", "", "", "", ""]
    error = f"{row['error']:.0e}"
    if row["status"] != "ok" or "speed_up" not in row:
        # The speed of a wrong kernel would be read as a figure, so there is none.
        return [row["status"] if row["status"] == "ok" else f"{row['status']}: {_why(row)}", "", "", "", error]
    taken = [f"{row[name] * 1e3:.3f}" for name in ("kernel_seconds", "twin_seconds")]
    memory = f"{row['kernel_bytes'] / 2**20:.0f} / {row['twin_bytes'] / 2**20:.0f}"
    return [*taken, f"{row['speed_up']:.2f}×", memory, error]


def _why(row: Mapping[str, Any]) -> str:
    if not row["bound_holds"]:
        return "a norm lies above its bound"
    return "off" if row["repeats"] else "two runs differ"


def table(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown.

    Args:
        report: As written to its file.

    Returns:
        One table.
    """
    lines = [
        "# Kernels\n",
        f"`{report['command']}`: {machine_line(report)}\n",
        "| kernel | shape of | sizes | type | kernel, ms | twin, ms | speed-up | memory, MB (kernel / twin) | error |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        sizes = "×".join(str(size) for size in row["shape"])
        cells = [row["kernel"], row["title"], sizes, row["dtype"], *_cells(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _write(report: Mapping[str, Any], folder: Path, stem: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{stem}.md").write_text(table(report), encoding="utf-8")


def main() -> int:
    """Measure every kernel and write the results.

    Returns:
        The exit status: 1 if a kernel failed or computed something wrong.
    """
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine.exact_float32()
    rows: list[dict[str, object]] = []
    report = {
        "command": " ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "quick": options.quick,
        "machine": machine.describe(device),
        "rows": rows,
    }
    for case in cases(quick=options.quick):
        if options.kernel and case.kernel.name not in options.kernel:
            continue
        rows.append(measure(case, device, rounds=options.rounds))
        print(" | ".join([case.kernel.name, case.title, str(case.dtype), *_cells(rows[-1])]), flush=True)
        # After every case, so that a run that is cut short has what it measured.
        _write(report, options.out, f"kernels-{device.type}{'-quick' if options.quick else ''}")
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
