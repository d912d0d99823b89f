"""Drive every row of the table of compatibility, or some of them, and write it: `python -m benchmarks.integrations`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import head, later, parser, short_line, version_of, write
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
    options.add_argument("--only", default="", help="drive rows whose name holds this; the others stay as they are")
    options.add_argument("--missing", action="store_true", help="drive rows that the table does not have yet")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    report, made, earlier = head("benchmarks.integrations", arguments), all_rows(), dict[str, Any](rows=[])
    if given.only or given.missing:
        earlier = json.loads((given.out / "integrations.json").read_text(encoding="utf-8"))
    known = {(row["tool"], row["feature"]) for row in earlier["rows"]} if given.missing else set[tuple[str, str]]()
    rows = [_driven(row) for row in made if given.only in row.name and (row.tool, row.feature) not in known]
    hosts = {name: version_of(name) for name in HOSTS}
    report |= {"hosts": hosts, "seconds": time.monotonic() - begun, "rows": rows}
    if earlier["rows"]:
        report = joined(earlier, report, [(row.tool, row.feature) for row in made])
    print(f"written: {write(given.out, 'integrations', report, markdown(report))}.json, .md")
    return int(any(row["found"] == "wrong" for row in report["rows"]))


def joined(earlier: Mapping[str, Any], report: Mapping[str, Any], names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return an earlier report with the rows that were driven again, of those that the table still has."""
    rows = {(row["tool"], row["feature"]): row for row in (*earlier["rows"], *report["rows"])}
    return {**earlier, "command": later(earlier, report), "rows": [rows[name] for name in names if name in rows]}


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
