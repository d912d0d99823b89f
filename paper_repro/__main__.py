"""Measure one of the published tables again: `python -m paper_repro --help`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from paper_repro import beside_opacus, stages
from paper_repro.accuracy.__main__ import main as accuracy
from paper_repro.capacity import add_capacity
from paper_repro.cases import Case, Size, Table
from paper_repro.data import DataError, with_data
from paper_repro.measure import Plan, measured
from paper_repro.memory import add_memory
from paper_repro.plot import plot
from paper_repro.report import markdown
from paper_repro.tables import LETTERS, load

RESULTS = Path(__file__).resolve().parent / "results"
STEPS = {"tiny": 3, "small": 100, "full": 100}
CAPS = {"tiny": 0.1, "small": 0.15, "full": 40.0}
MOST = {"tiny": 8, "small": 1024, "full": 4096}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paper_repro", description=__doc__)
    parser.add_argument("table", choices=(*LETTERS, "F"), help="which table; F has options of its own: F --help")
    parser.add_argument("--device", default="cpu", help="cpu (the default), or cuda, which runs the full sizes")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--tiny", action="store_true", help="does it run, in seconds; not how fast")
    sizes.add_argument("--full", action="store_true", help="the published sizes, also on a CPU")
    parser.add_argument("--minutes", type=float, help="time for the whole table, about (default: the table's own)")
    parser.add_argument("--steps", type=int, help="most rounds of timing a case (default: 100, tiny 3)")
    parser.add_argument("--case", action="append", help="only this model, by its short name; repeatable")
    parser.add_argument("--engine", action="append", help="only this engine beside the non-private one; likewise")
    parser.add_argument("--data", type=Path, help="folder with the real data sets (default: synthetic inputs)")
    parser.add_argument("--times-only", action="store_true", help="no largest batches (D), no memory by stage (C)")
    parser.add_argument("--cap", type=float, help="GiB that table D looks for the largest batch in")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    return parser


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace, size: Size) -> tuple[Table, list[Case]]:
    """The table and the cases wanted of it, with real data if there is some."""
    table = load(options.table, size)
    groups = dict.fromkeys(case.group for case in table.cases)
    names = [engine.name for engine in table.engines(False)]
    for option, given, known in (("--case", options.case, list(groups)), ("--engine", options.engine, names)):
        unknown = sorted(set(given or ()) - set(known))
        if unknown:
            parser.error(f"argument {option}: unknown: {', '.join(unknown)} (there are: {', '.join(known)})")
    if options.steps is not None and options.steps < 1:
        parser.error(f"argument --steps: {options.steps} is not at least 1")
    if options.minutes is not None and not options.minutes >= 0:
        parser.error(f"argument --minutes: {options.minutes} is negative")
    cases = [case for case in table.cases if not options.case or case.group in options.case]
    if options.data:
        try:
            cases = [with_data(case, options.data) for case in cases]
        except DataError as problem:
            parser.error(f"argument --data: {problem}")
    return table, cases


def _device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        parser.error(f"argument --device: {name}: {str(problem).splitlines()[0]}")
    return device


def _measure(
    table: Table, size: Size, plan: Plan, cap: float | None, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything that the table has; what is there after each case is kept. Without a cap, times alone."""

    def after(case: Case, found: dict[str, Any]) -> None:
        if table.memory and plan.device.type == "cpu" and cap is not None:
            add_memory(table.letter, size, case, found)
        if table.extra == "capacity" and cap is not None:
            add_capacity(table.letter, size, case, found, {"device": plan.device, "cap": cap, "most": MOST[size]})

    report: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []
    for case in measured(table, plan, after):
        cases.append(case)
        report = {"cases": cases, "beside_opacus": beside_opacus.cells(cases)}
        keep(report)
    if table.extra == "stages" and cap is not None:
        report["stages"] = list(stages.measured(size, plan.device, plan.only))
    return report


def _write(report: dict[str, Any], table: Table, folder: Path) -> str:
    """Write the files, but the picture; return where they are, without an ending."""
    device = report["machine"]["device"].split(":")[0]
    stem = f"table-{table.letter.lower()}-{device}{'-tiny' if report['size'] == 'tiny' else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{stem}.md").write_text(markdown(report, table), encoding="utf-8")
    return str(folder / stem)


def main(arguments: list[str] | None = None) -> int:
    """Run one table.

    Args:
        arguments: The command line after the program's name; the process's own by default.

    Returns:
        The exit status: 1 if a strategy of ghostclip failed, other than for memory, or computed something wrong; or
            spent more than its ε.
    """
    parser = _parser()
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["F"]:
        return accuracy(given[1:])
    options = parser.parse_args(given)
    device = _device(parser, options.device)
    size: Size = "tiny" if options.tiny else "full" if options.full or device.type == "cuda" else "small"
    table, cases = _chosen(parser, options, size)
    table = replace(table, cases=tuple(cases))
    if options.threads:
        torch.set_num_threads(options.threads)
    harness.exact_float32()
    minutes = table.minutes if options.minutes is None else options.minutes
    steps = options.steps or STEPS[size]
    plan = Plan(device, steps, 60 * minutes, frozenset(options.engine or ()))
    cap = None if options.times_only else options.cap or CAPS[size]
    notes = [
        f"At most {steps} rounds of timing a case, fewer (three at least) so that the whole fits {minutes:g} "
        "minutes; other libraries' engines that would burst that are left out where a step of theirs says so.",
    ]
    notes += [f"Inputs: {'the data sets in the folder given' if options.data else 'synthetic, of the real shapes'}."]
    if options.times_only:
        notes.append("Times alone" + (", and the allocator's memory." if device.type == "cuda" else "."))
    elif table.extra == "capacity":
        notes.append(
            f"Largest batch: under {cap:g} GiB for everything but the program itself, to within 3 %; on a GPU of the "
            "allocator's memory, on a CPU of the process's own data. Batches above "
            f"{MOST[size]} are not tried."
        )
    head = {
        "command": shlex.join(["python", "-m", "paper_repro", *given]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "table": table.letter,
        "size": size,
        "machine": harness.describe(device),
        "notes": notes,
        "references": [vars(reference) for reference in table.references],
    }

    def keep(found: dict[str, Any]) -> None:
        _write({**head, **found}, table, options.out)

    found = _measure(table, size, plan, cap, keep)
    report = {**head, **found}
    stem = _write(report, table, options.out)
    plot(report, Path(f"{stem}.png"))
    sys.stdout.write(f"\n{markdown(report, table)}\nwritten: {stem}.json, .md, .png\n")
    rows = [row for case in report["cases"] for row in case["engines"] if row["title"].startswith("ghostclip")]
    return int(any(row["status"] != "ok" and row.get("problem") != "out of memory" for row in rows))


if __name__ == "__main__":
    harness.keep_heap()
    sys.exit(main())
