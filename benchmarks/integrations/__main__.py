"""Drive every row of the table of compatibility and write it: `python -m benchmarks.integrations`."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import head, parser, short_line, version_of, write
from tests.integrations.table import Row, all_rows, outcome_of

HOSTS = (
    *("torch", "transformers", "peft", "trl", "accelerate", "datasets", "lightning", "timm"),
    *("bitsandbytes", "torchao"),
)
DIFFS = Path(__file__).resolve().parent / "diffs.md"
"""Scripts before and after, written by hand."""


def main(arguments: list[str] | None = None) -> int:
    """Drive the rows."""
    options = parser("benchmarks.integrations", __doc__)
    options.add_argument("--only", default="", help="drive only rows whose name holds this, and write nothing")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    report = head("benchmarks.integrations", arguments)
    rows = [_driven(made) for made in all_rows() if given.only in made.name]
    hosts = {name: version_of(name) for name in HOSTS}
    report |= {"hosts": hosts, "seconds": time.monotonic() - begun, "rows": rows}
    if not given.only:
        print(f"written: {write(given.out, 'integrations', report, markdown(report))}.json, .md")
    return int(any(row["found"] == "wrong" for row in rows))


def _driven(made: Row) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome_of(made, Path(folder))
    print(f"{made.name}: {found.outcome}{' - ' + found.said if found.outcome == 'wrong' else ''}", flush=True)
    return {
        "tool": made.tool,
        "feature": made.feature,
        "expected": made.outcome,
        "found": found.outcome,
        "said": found.said.replace(folder, "…"),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in report["hosts"].items() if version)
    counts = ", ".join(f"{count} {name}" for name, count in Counter(r["found"] for r in report["rows"]).most_common())
    parts = [
        "# The tools people train with\n",
        short_line(report, versions) + "\n",
        "exact: with what was compared. refused: by an error, before anything is released, whose first sentence is "
        "given. Each row is a test (`tests/integrations`).\n",
        f"{len(report['rows'])} rows: {counts}.\n",
    ]
    for tool in dict.fromkeys(row["tool"] for row in report["rows"]):
        parts.append(f"## {tool} {report['hosts'].get(tool.split()[0].lower()) or ''}\n".replace(" \n", "\n"))
        parts.append("| feature | outcome | compared, or the refusal |\n|---|---|---|")
        parts += [_line(row) for row in report["rows"] if row["tool"] == tool]
        parts.append("")
    if DIFFS.exists():
        parts.append(DIFFS.read_text(encoding="utf-8"))
    return "\n".join(parts)


def _line(row: Mapping[str, Any]) -> str:
    said = _sentence(row["said"]) if row["found"] == "refused" else row["said"]
    outcome = row["found"] if row["found"] != "wrong" else "**wrong**"
    cells = [cell.replace("|", "\\|") for cell in (row["feature"], outcome, said)]
    return f"| {' | '.join(cells)} |"


def _sentence(text: str) -> str:
    """Return the first sentence of a refusal, at most 300 characters."""
    sentence = text.partition(". ")[0].rstrip(".") + "."
    return sentence if len(sentence) <= 300 else sentence[:297] + "..."


if __name__ == "__main__":
    sys.exit(main())
