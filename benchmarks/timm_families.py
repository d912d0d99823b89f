"""Measure the families of timm's models and write the table: `python -m benchmarks.timm_families [NAME ...]`."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch

from benchmarks.harness import head, parser, short_line, version_of, write
from tests.integrations.timm_families import FAMILIES, SAMPLES, TOLERANCE, Found, measure


def main(arguments: list[str] | None = None) -> int:
    """Measure."""
    options = parser("benchmarks.timm_families", __doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="families (default: all, and the table is written)")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun, rows = time.monotonic(), []
    report = head("benchmarks.timm_families", arguments)
    for family in FAMILIES:
        if not given.names or family.name in given.names:
            started = time.monotonic()
            try:
                found = measure(family)
            except Exception as error:  # noqa: BLE001 - whatever a user would meet is the result
                found = Found(family.name, family.model, outcome="wrong", said=f"{type(error).__name__}: {error}")
            rows.append(found.plain())
            print(f"{family.name}: {found.outcome} {found.error} {found.said[:300]} "
                  f"({time.monotonic() - started:.0f} s)", flush=True)  # fmt: skip
    report |= {"timm": version_of("timm"), "seconds": time.monotonic() - begun, "rows": rows}
    if not given.names:
        print(f"written: {write(given.out, 'timm', report, markdown(report))}.json, .md")
    return int(any(row["outcome"] == "wrong" for row in rows))


def markdown(report: dict[str, Any]) -> str:
    """Return the table."""
    rows = report["rows"]
    exact = [row for row in rows if row["outcome"] == "exact"]
    worst = max((row["error"] for row in exact), default=0.0)
    move = max((row["move"] for row in exact), default=0.0)
    lines = [
        "# Families of timm's models\n",
        short_line(report, f"torch {torch.__version__}, timm {report['timm']}") + "\n",
        f"One small model a family, random weights, float64, {SAMPLES} samples, after `ModuleValidator.fix`. exact: "
        f"the clipped sum is that of one sample at a time up to {TOLERANCE:g}, and leaving out one sample moves it by "
        "at most C. Dropout and stochastic depth are off, since they draw other numbers for a sample alone.\n",
        f"{len(exact)} of {len(rows)} families are exact (largest error {worst:.1e}, largest move {move:.6f} C).\n",
        "| family | model | parameters | replaced by `fix` | outcome | error | move / C |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    for row in rows:
        replaced = ", ".join(f"{count} {name}" for name, count in sorted(row["replaced"].items())) or "nothing"
        replaced += "" if row["num_groups"] is None else f" (num_groups={row['num_groups']})"
        outcome = row["outcome"] if not row["said"] else f"{row['outcome']}: {row['said']}".replace("|", "\\|")
        error, moved = (f"{row['error']:.0e}", f"{row['move']:.4f}") if row["move"] is not None else ("", "")
        lines.append(
            f"| {row['family']} | {row['model']} | {row['parameters']:,} | {replaced} | {outcome} | {error} | {moved} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
