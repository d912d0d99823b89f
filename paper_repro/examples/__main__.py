"""Run the examples one after the other and write down what they reach: `python -m paper_repro.examples [NAME ...]`."""
# ruff: noqa: T201 - a program that people look at

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import harness
from benchmarks.harness import machine_line
from paper_repro.examples import NAMES, audited

RESULTS: Final = Path(__file__).resolve().parents[1] / "results"


def summary(name: str) -> str:
    """Return what an example is about.

    Args:
        name: One of `NAMES`.

    Returns:
        The first line of its docstring.
    """
    return (importlib.import_module(f"paper_repro.examples.{name}").__doc__ or "").partition("\n")[0]


def run(name: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run an example.

    Args:
        name: One of `NAMES`.
        arguments: Its command line.

    Returns:
        What it found and how long it took, or which package it is missing.
    """
    began = _processor_seconds()
    try:
        found = importlib.import_module(f"paper_repro.examples.{name}").main(list(arguments))
    except ModuleNotFoundError as missing:
        return {"name": name, "missing": missing.name}
    return {"name": name, "about": summary(name), "found": found, "seconds": _processor_seconds() - began}


def _processor_seconds() -> float:
    """Of this process and of those it has started and waited for; other programs may run beside."""
    return sum(os.times()[:4])


def markdown(report: Mapping[str, Any]) -> str:
    """Write the report for people.

    Args:
        report: What `main` puts together.

    Returns:
        The page.
    """
    lines = [
        "# Examples\n",
        f"`{report['command']}` on {machine_line(report)} Each is a file of "
        "`paper_repro/examples`, with its defaults.\n",
        "| example | what it trains | reached | without learning | ε at δ = 1e-5 | CPU, s | audit of a short run |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for row in report["examples"]:
        if "missing" in row:
            lines.append(f"| `{row['name']}` | not run: needs {row['missing']} | | | | | |")
            continue
        found = row["found"]
        reached, chance = _reached(found)
        cost = f"{found['epsilon']:.2f} | {row['seconds']:.0f}"
        lines.append(f"| `{row['name']}` | {row['about']} | {reached} | {chance} | {cost} | {_audit(row)} |")
    return "\n".join(lines) + "\n"


def _audit(row: Mapping[str, Any]) -> str:
    """What the audit of an example has shown, in a line."""
    if row["audit"] is None:
        return f"not audited: {audited.NOT_AUDITED[row['name']]}"
    seen = row["audit"]
    return "; ".join(seen["problems"]) or (
        f"passed: first sum off by {seen['error']:.0e}, a record moves it by {seen['move']:.6f} C, "
        f"noise {seen['noise']:.2f} σC, ε {seen['epsilon']:.2f} ({seen['epsilon_due']:.2f} due), "
        f"canaries prove {seen['canaries']:.2f}"
    )


def audit(name: str) -> dict[str, Any] | None:
    """Audit an example.

    Args:
        name: One of `NAMES`.

    Returns:
        What was measured, in plain values; None for those that are not audited.
    """
    if name in audited.NOT_AUDITED:
        return None
    seen = audited.audit(name)
    return {
        "problems": seen.problems(),
        "error": seen.error,
        "move": seen.move,
        "noise": seen.noise,
        "epsilon": seen.epsilon,
        "epsilon_due": seen.epsilon_due,
        "canaries": seen.canaries.epsilon,
    }


def _reached(found: Mapping[str, float]) -> tuple[str, str]:
    """What an example has reached, and what it would have without learning."""
    if "accuracy" in found:
        return f"{found['accuracy']:.1%} right", f"{found['chance']:.1%}"
    if "perplexity" in found:
        return f"perplexity {found['perplexity']:.0f} (lower is better)", f"{found['before']:.0f}"
    return f"distance {found['after']:.2f}", f"{found['before']:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        The exit status: 1 if an example could not run or did not pass its audit.
    """
    parser = argparse.ArgumentParser(prog="python -m paper_repro.examples", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="say what each is about, and run none")
    parser.add_argument("--out", type=Path, help="folder for the table (default: written only when all ran)")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no example {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.list:
        print("\n".join(f"{name:16} {summary(name)}" for name in NAMES))
        return 0
    rows = []
    for name in options.names or NAMES:
        print(f"\n== {name}: {summary(name)}", flush=True)
        row = run(name)
        rows.append(row if "missing" in row else row | {"audit": audit(name)})
    report = {
        "command": "python -m paper_repro.examples",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": harness.describe(torch.device("cpu")),
        "examples": rows,
    }
    page = markdown(report)
    print(f"\n{page}")
    missing = [row for row in rows if "missing" in row]
    folder = options.out or (RESULTS if not options.names and not missing else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "examples-cpu.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (folder / "examples-cpu.md").write_text(page, "utf-8")
    failed = [row for row in rows if row.get("audit") and row["audit"]["problems"]]
    return int(bool(missing or failed))


if __name__ == "__main__":
    raise SystemExit(main())
