"""The table of cases as Markdown: one line a family for the README, one line a case for the results."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

import tests.cases
from benchmarks.cases.measure import Row


def families() -> dict[str, tuple[str, list[str]]]:
    """List the families of the tests' table."""
    found = {}
    for module_info in pkgutil.iter_modules(tests.cases.__path__):
        module = importlib.import_module(f"tests.cases.{module_info.name}")
        names = [case.name for case in getattr(module, "CASES", ())]
        if names:
            found[module_info.name] = ((module.__doc__ or "").splitlines()[0], names)
    return found


def summary(rows: Sequence[Row]) -> str:
    """Return one line a family."""
    by_name = {row["name"]: row for row in rows}
    lines = [
        "| family | cases | exact | refused | largest error | largest move / C |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for text, names in families().values():
        own = [by_name[name] for name in names if name in by_name]
        exact = [row for row in own if "refused" not in row]
        error = max((max(row["errors"].values()) for row in exact), default=0.0)
        move = max((row.get("sensitivity", 0.0) for row in exact), default=0.0)
        lines.append(f"| {text} | {len(own)} | {len(exact)} | {len(own) - len(exact)} | {error:.0e} | {move:.4f} |")
    return "\n".join(lines) + "\n"


def details(rows: Sequence[Row]) -> str:
    """Return one line a case, family by family, and the texts of the refusals."""
    by_name = {row["name"]: row for row in rows}
    parts = []
    for text, names in families().values():
        lines = [
            "| case | bookkeeping | ghost | fast | hooks | move / C | handled as |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        lines += [_line(by_name[name]) for name in names if name in by_name]
        parts.append(f"### {text}\n\n" + "\n".join(lines) + "\n")
    refused = [f"- `{row['name']}`: {row['refused']}" for row in rows if "refused" in row]
    return "\n".join(parts) + "\n### Refused\n\n" + "\n".join(refused) + "\n"


def _line(row: Row) -> str:
    forms = "; ".join(row["forms"])
    if "refused" in row:
        return f"| {row['name']} | refused | refused | refused | refused | | |"
    errors = " | ".join(f"{row['errors'][key]:.0e}" for key in ("bookkeeping", "ghost", "fast", "hooks"))
    move = f"{row['sensitivity']:.4f}" if "sensitivity" in row else "random"
    return f"| {row['name']} | {errors} | {move} | {forms} |"
