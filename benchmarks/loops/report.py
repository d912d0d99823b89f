"""The outcomes of loops as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import short_line

_SENTENCE = re.compile(r"(.*?[.:](?=\s)|.*)")


def first_sentence(text: str) -> str:
    """Return the first sentence of an error's text, its class included."""
    kind, _, rest = text.partition(": ")
    matched = _SENTENCE.match(rest)
    sentence = f"{kind}: {matched.group(1) if matched else rest}" if rest else text
    return (sentence if len(sentence) <= 240 else sentence[:237] + "...").replace("|", "\\|")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def line(row: Mapping[str, Any]) -> str:
    """Return one line of a table."""
    said = "; ".join(row["problems"]).replace("|", "\\|") or first_sentence(row["message"])
    said = "; ".join(text for text in (said, row["note"].replace("|", "\\|")) if text)
    cells = [
        f"{row['name']}: {row['about']}",
        row["outcome"] + ("" if row["shortfall"] == "" else " **(not as it should be)**"),
        _figure(row["error"], ".0e"),
        _figure(row["move"], ".4f"),
        f"{row['applied']} / {row['accounted']}" if row["applied"] or row["accounted"] else "",
        " / ".join(_figure(row[name], ".2f") for name in ("epsilon", "epsilon_due") if row[name] is not None),
        said,
    ]
    return "| " + " | ".join(cells) + " |"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count outcomes."""
    counts = Counter(row["outcome"] for row in rows)
    short = sum(row["shortfall"] != "" for row in rows)
    text = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"{len(rows)} loops: {text}; {short} not as they should be."


def markdown(report: Mapping[str, Any]) -> str:
    """Return the whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in report["hosts"].items() if version)
    rows = [row for family in report["families"].values() for row in family]
    parts = [
        "# Loops\n",
        short_line(report, versions) + "\n",
        "error: of a released sum against one record at a time in float64, relative. move: by how much leaving one "
        "record out moves it, over C. Sums are what was released times the expected batch size and times the backward "
        "passes that the loop made for the step, as Opacus divides. releases: applied by the innermost optimizers / "
        "accounted for. ε: printed / computed apart, for releases moved by as much. A loop has to be exact, or refused "
        "before its first release; listed is a script that meets a difference from Opacus that is listed as one. Where "
        "a host computes in fewer bits, the rounding of a record follows the size of the batch; the row says what is "
        "allowed for it.\n",
        summary(rows) + "\n",
    ]
    for family, own in report["families"].items():
        parts.append(
            f"## {family}\n\n| loop | outcome | error | move / C | releases | ε | what is wrong, or the refusal |\n"
            "|---|---|---:|---:|---:|---:|---|\n" + "\n".join(line(row) for row in own) + "\n"
        )
    return "\n".join(parts)
