"""Every public name of Opacus in one table: the same, different and why, or refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.opacus_surface import outcomes
from benchmarks.opacus_surface.compare import difference
from benchmarks.opacus_surface.differences import DIFFERENCES
from benchmarks.opacus_surface.reasons import Reason, reason_for
from benchmarks.opacus_surface.walk import Name, public_names

STATUSES = ("same", "differs", "refused")


class Row(NamedTuple):
    """One name of the surface."""

    path: str
    kind: str
    status: str
    """"same", "differs", "refused", or "unaccounted": none of the reasons fits."""
    form: str
    """What differs in form."""
    reason: Reason | None


def rows(package: ModuleType) -> list[Row]:
    """Compare every public name of a package with ours.

    Args:
        package: Opacus.

    Returns:
        The rows, in the order of the walk.
    """
    return [_row(name) for name in public_names(package)]


def _row(name: Name) -> Row:
    if name.problem:
        reason = reason_for(name.path, refused=False)
        return Row(name.path, name.kind, "differs" if reason else "unaccounted", name.problem, reason)
    form = difference(name)
    if form == "":
        return Row(name.path, name.kind, "same", "", None)
    reason = reason_for(name.path, refused=form is None)
    status = "unaccounted" if reason is None else "refused" if form is None else "differs"
    return Row(name.path, name.kind, status, form or "", reason)


def report(found: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written to the results.

    Args:
        found: The rows.
        about: The machine and the command.

    Returns:
        Plain values, ready for JSON.
    """
    counted = Counter(row.status for row in found)
    names = [
        {"name": row.path, "kind": row.kind, "status": row.status, "form": row.form}
        | ({"why": row.reason.why} if row.reason else {})
        for row in found
    ]
    behaviour = [entry._asdict() for entry in DIFFERENCES]
    return {**about, "counts": dict(counted), "names": names, "differences": behaviour}


def markdown(given: Mapping[str, Any]) -> str:
    """Write the report for people.

    Args:
        given: What `report` returned.

    Returns:
        The page.
    """
    counts, total = given["counts"], len(given["names"])
    shares = ", ".join(f"{counts.get(status, 0)} {status}" for status in STATUSES)
    lines = [
        "# Coming from Opacus\n",
        f"`{given['command']}`, {given['date']}, Opacus {given['opacus']}: {total} public names (modules, classes, "
        f"their public members, functions, values; Opacus's own tests left out): {shares}. *Same* means that every "
        "call that Opacus takes is taken here, with the same defaults.\n",
        "Change `opacus` to `ghostclip.compat.opacus` in the imports.\n",
        "## What does something else on purpose\n",
        "| | Opacus | ghostclip | shown by |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row['what']} | {row['opacus']} | {row['here']} | `{row['test']}` |" for row in given["differences"]]
    lines += ["", outcomes.markdown(given["scripts"]).rstrip()]
    for status, title in (("differs", "Names that differ in form"), ("refused", "Names without a counterpart")):
        lines += ["", f"## {title}\n", "| name | | why |", "|---|---|---|"]
        lines += [
            f"| `{row['name']}` | {row['form']} | {row.get('why', '')} |"
            for row in given["names"]
            if row["status"] == status
        ]
    same = [f"`{row['name']}`" for row in given["names"] if row["status"] == "same"]
    lines += ["", "## Names that are the same\n", ", ".join(same) + "."]
    return "\n".join(lines).replace("**kwargs", r"\*\*kwargs").replace(r"`\*\*kwargs`", "`**kwargs`") + "\n"
