"""From answers to a table: failures, settings below a valid lower bound, time, memory, tightness."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.harness import table

_COLUMNS = "accountant | settings | failures | below lower bound | median, s | p90, s | max, s | MB | tightness"
LOWER = "ghostclip, lower bound"
VALID = ("ghostclip", "ghostclip RDP", "Opacus RDP", "Opacus PRV", "dp-accounting RDP", "dp-accounting PLD")


def _number(answer: dict[str, Any]) -> float | None:
    value = answer["epsilon"]
    return float(value) if isinstance(value, (int, float)) and value >= 0 and math.isfinite(value) else None


def best_known(row: dict[str, Any]) -> float | None:
    """Return the least ε among accountants that give upper bounds and are not below the lower bound."""
    lower = _number(row["answers"].get(LOWER, {"epsilon": 0.0})) or 0.0
    values = [_number(row["answers"][name]) for name in VALID if name in row["answers"]]
    return min((value for value in values if value is not None and value >= lower * (1 - 1e-9)), default=None)


def _line(name: str, rows: list[dict[str, Any]]) -> tuple[list[object], bool]:
    rows = [row for row in rows if name in row["answers"]]
    answers = [row["answers"][name] for row in rows]
    values = [_number(answer) for answer in answers]
    failures = sum(value is None for value in values)
    below, ratios = 0, []
    for row, value in zip(rows, values, strict=True):
        lower = _number(row["answers"].get(LOWER, {"epsilon": 0.0})) or 0.0
        best = best_known(row)
        if value is not None and value < lower * (1 - 1e-9) and name != LOWER:
            below += 1
        if value is not None and best is not None and 0.1 <= best <= 50:
            ratios.append(value / best)
    seconds = sorted(answer["seconds"] for answer in answers if answer["seconds"] is not None)
    grown = max((answer["grown_mb"] for answer in answers if answer["grown_mb"] is not None), default=0.0)
    times = (
        [statistics.median(seconds), seconds[int(0.9 * (len(seconds) - 1))], seconds[-1]] if seconds else [math.nan] * 3
    )
    extreme = (min if name == LOWER else max)(ratios, default=math.nan)
    shown = [f"{value:.3g}" for value in times]
    cells = [name, len(rows), failures, below, *shown, f"{grown:.0f}", f"{extreme:.4f}"]
    return cells, bool(failures or below)


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> tuple[str, bool]:
    """Return the report, and whether our own accountant failed or fell below a lower bound."""
    on, limits = about["machine"], about["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    lines = [
        f"`{about['command']}` on {on['cpu']}, one thread, {on['os']}; Python {on['python']}, {versions}; "
        f"commit {str(on['commit'])[:10]}, {about['date']}. A failure is NaN, inf, a negative ε, an error, more than "
        f"{limits['seconds']:g} s, or more than {limits['megabytes']} MB of address space. Tightness: worst ε over the "
        "best upper bound of all, where that lies in [0.1, 50] (of the lower bound: least).\n"
    ]
    failed = False
    for group, title in (("usual", "Usual settings"), ("edge", "Edges")):
        chosen = [row for row in rows if row["group"] == group]
        if not chosen:
            continue
        found = {name: _line(name, chosen) for name in chosen[0]["answers"]}
        failed = failed or found.get("ghostclip", ([], False))[1]
        lines.append(f"**{title}** ({len(chosen)})\n\n{table(_COLUMNS, [cells for cells, _ in found.values()])}")
    return "\n".join(lines), failed
