"""Every case of the tests in every strategy, as a table: what is exact, by how much, and what is refused.

`python -m benchmarks.cases` writes cases.json and cases.md (a few minutes on one core).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tests.cases
from benchmarks.harness import CPU, describe, parser, table, write
from ghostclip.errors import GhostClipError
from tests.cases import ALL_CASES, Case
from tests.exactness.runs import STRATEGIES, engine, expected, moved, relative_error, run

Row = dict[str, object]


def measure(case: Case) -> Row:
    """Measure a case."""
    begun = time.process_time()
    dtype = torch.float64 if torch.float64 in case.dtypes else case.dtypes[0]
    row: Row = {"name": case.name, "dtype": str(dtype)[6:], "forms": _forms(case, dtype)}
    try:
        row["errors"] = {strategy: _error(case, strategy, dtype) for strategy in STRATEGIES}
        if "random" not in case.tags:
            make = engine("bookkeeping", batch_first=case.batch_first)
            row["sensitivity"] = max(moved(case, make, dtype))
    except GhostClipError as error:
        row["refused"] = " ".join(str(error).split())
    row["cpu_s"] = round(time.process_time() - begun, 2)
    return row


def _error(case: Case, strategy: str, dtype: torch.dtype) -> float:
    outcome = run(case, engine(strategy, batch_first=case.batch_first), dtype)
    return relative_error(outcome.clipped, expected(case.name).clipped)


def _forms(case: Case, dtype: torch.dtype) -> list[str]:
    """How the parameters of a case are handled, each form once."""
    model = case.model(dtype)
    clipper = engine("bookkeeping", batch_first=case.batch_first)(model, 1.0)
    try:
        with case.numerics(dtype):
            clipper.backward(case.losses(model, case.data(dtype)))
    except GhostClipError:
        return []
    return sorted({row.handled for row in clipper.coverage()})


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
    lines = []
    for text, names in families().values():
        own = [by_name[name] for name in names if name in by_name]
        exact = [row for row in own if "refused" not in row]
        error = max((max(row["errors"].values()) for row in exact), default=0.0)
        move = max((row.get("sensitivity", 0.0) for row in exact), default=0.0)
        lines.append([text, len(own), len(exact), len(own) - len(exact), f"{error:.0e}", f"{move:.4f}"])
    return table("family | cases | exact | refused | largest error | largest move / C", lines)


def details(rows: Sequence[Row]) -> str:
    """Return one line a case, family by family, and the texts of the refusals."""
    by_name = {row["name"]: row for row in rows}
    parts = []
    for text, names in families().values():
        lines = ["| case | bookkeeping | ghost | fast | hooks | move / C | handled as |", f"|---|{'---:|' * 5}---|"]
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


def markdown(report: Mapping[str, Any]) -> str:
    """Return the whole report."""
    heading = f"# Cases\n\nWritten by `python -m benchmarks.cases` in {report['cpu_s']:.0f} s of one core.\n"
    legend = (
        "Errors: of the clipped sum against one-sample autograd in float64, relative. Move / C: by how much "
        "leaving one sample out moves the sum, over the bound; at most 1.\n"
    )
    return "\n".join([heading, legend, summary(report["cases"]), details(report["cases"])])


def main() -> int:
    """Measure all cases and write the table."""
    options = parser("benchmarks.cases", __doc__)
    options.add_argument("--only", default="", help="measure only cases whose name holds this, and write nothing")
    given = options.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    rows = []
    for case in (case for case in ALL_CASES if given.only in case.name):
        rows.append(measure(case))
        print(f"{case.name}: {rows[-1].get('refused') or rows[-1]['errors']}", flush=True)
    wrong = [row["name"] for row in rows if "refused" not in row and max(row["errors"].values()) > 1e-5]
    if not given.only:
        report = {"machine": describe(CPU), "cpu_s": round(time.process_time() - begun, 1), "cases": rows}
        write(given.out, "cases", report, markdown(report))
    print(f"{len(rows)} cases, wrong: {wrong or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
