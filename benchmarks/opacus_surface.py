"""Compare the surfaces, run scripts with both packages, write the tables: `python -m benchmarks.opacus_surface`."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import head, parser, write
from tests.compat.surface import outcomes
from tests.compat.surface.differences import DIFFERENCES
from tests.compat.surface.table import Row, rows

STATUSES = ("same", "differs", "refused")


def _report(found: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written to the results."""
    counted = Counter(row.status for row in found)
    names = [
        {"name": row.path, "kind": row.kind, "status": row.status, "form": row.form}
        | ({"why": row.reason.why} if row.reason else {})
        for row in found
    ]
    behaviour = [entry._asdict() for entry in DIFFERENCES]
    return {**about, "counts": dict(counted), "names": names, "differences": behaviour}


def _markdown(given: Mapping[str, Any]) -> str:
    """Write the report for people."""
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
    lines += ["", _scripts(given["scripts"]).rstrip()]
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


def _scripts(given: Sequence[Mapping[str, Any]]) -> str:
    """Write the outcomes for people."""
    same = sum(row["status"] == "same" for row in given)
    lines = [
        "## Scripts with the import changed\n",
        f"{len(given)} scripts ([scripts](../../tests/compat/surface/scripts)), run as they are with Opacus and with "
        f"`opacus` changed to `ghostclip.compat.opacus`: {same} show the same (ε may be lower: a tighter account).\n",
        "| script | | ε, Opacus | ε, ghostclip | remark |\n|---|---|---:|---:|---|",
    ]
    for row in given:
        epsilon = [f"{row[side]:.3f}" if row[side] is not None else "" for side in ("theirs", "ours")]
        lines.append(f"| {row['script']} | {row['status']} | {epsilon[0]} | {epsilon[1]} | {row['remark']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare, run, write, and fail if a name is unaccounted for or a script fails here."""
    given = parser("benchmarks.opacus_surface", __doc__).parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import opacus

        found = rows(opacus)
        scripts = outcomes.plain(outcomes.pairs())
    about = head("benchmarks.opacus_surface", None)
    result = {**_report(found, {**about, "opacus": opacus.__version__}), "scripts": scripts}
    write(given.out, "opacus-surface", result, _markdown(result))
    missing = [row.path for row in found if row.status == "unaccounted"]
    sys.stdout.write(f"{result['counts']}\n" + "".join(f"unaccounted: {path}\n" for path in missing))
    failing = [row for row in scripts if row["status"].startswith("fails")]
    sys.stdout.write("".join(f"{row['status']}: {row['script']}: {row['remark']}\n" for row in failing))
    return 1 if missing or failing else 0


if __name__ == "__main__":
    raise SystemExit(main())
