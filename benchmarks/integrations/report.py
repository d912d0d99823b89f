"""The table of compatibility as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIFFS = Path(__file__).resolve().parent / "diffs.md"
"""Scripts before and after, written by hand."""


def markdown(report: Mapping[str, Any]) -> str:
    """Return the whole report."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["hosts"].items() if version)
    counts = ", ".join(f"{count} {name}" for name, count in Counter(r["found"] for r in report["rows"]).most_common())
    parts = [
        "# The tools people train with\n",
        f"`{report['command']}`, {report['date']}, {report['seconds']:.0f} s; {machine['cpu']}, {machine['cores']} "
        f"cores; Python {machine['python']}, {versions}; commit {str(machine['commit'])[:10]}"
        f"{', changed since' if machine['changed_since_commit'] else ''}.\n",
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
