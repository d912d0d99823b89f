"""Rails of a rewrite: what two checkouts of the package compute and refuse, side by side.

    python -m benchmarks.rails OLD                      # against this checkout: every case in every strategy
    python -m benchmarks.rails OLD NEW --only linear    # cases whose names contain a word
    python -m benchmarks.rails OLD --tests tests/loops tests/checks   # what tests refuse, by test and kind

The cases, the architectures and the tests are those of this checkout; ``ghostclip`` is that of each tree. A row is one
case in one strategy in float64: the norms of its samples and its clipped sum for C = 1, or the error that refused it.
Printed is what differs: bits (with the relative difference of norms and of sums), what was accepted and is refused,
what was refused and is accepted, and errors of another kind. ``--keep FOLDER`` writes what each tree did, which stands
in for the tree the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
# Architectures beside the cases: evenly spread over the table.
ARCHITECTURES = 60
_WITHOUT_NUMBERS = re.compile(r"[0-9][0-9.e+-]*")
# What a row of a refusal keeps of an error's text.
_KEPT = 90

Row = dict[str, Any]


def refusal(error: BaseException) -> str:
    """Return what tells a refusal again: the error's class and the beginning of its text, without numbers."""
    return f"{type(error).__name__}: {_WITHOUT_NUMBERS.sub('#', str(error))[:_KEPT]}"


def rows(only: str) -> Iterator[tuple[str, Row]]:
    """Run every case, and architectures spread over their table, in every strategy."""
    from ghostclip.errors import GhostClipError
    from tests.architectures.known import ALL
    from tests.cases import ALL_CASES
    from tests.exactness.runs import backward, engine

    spread = [row.case for row in ALL[:: max(1, len(ALL) // ARCHITECTURES)]][:ARCHITECTURES]
    for case in [case for case in (*ALL_CASES, *spread) if only in case.name]:
        for strategy in STRATEGIES:
            torch.manual_seed(0)
            try:
                model = case.model(torch.float64)
                clipper = engine(strategy, batch_first=case.batch_first)(model, 1.0)
                done = backward(case, model, clipper, case.data(torch.float64), torch.float64)
                yield f"{case.name} {strategy}", {"norms": done.norms_B, "sums": done.clipped}
                clipper.remove()  # type: ignore[attr-defined]
            except GhostClipError as error:
                yield f"{case.name} {strategy}", {"refused": refusal(error)}
            except Exception as error:  # noqa: BLE001 - a row that fails is a row
                yield f"{case.name} {strategy}", {"failed": refusal(error)}


def pytest_configure() -> None:
    """Note every error of the package that is made in a test, where this file is a plugin of pytest."""
    from ghostclip.errors import GhostClipError

    path, made = Path(os.environ["GHOSTCLIP_RAILS"]), BaseException.__init__

    def noting(self: Any, *args: Any) -> None:
        made(self, *args)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([test, refusal(self)]) + "\n")

    GhostClipError.__init__ = noting  # type: ignore[method-assign]


def done_by(tree: Path, only: str, tests: Sequence[str]) -> dict[str, Row]:
    """Return the rows of one checkout, run in a process of its own."""
    if tree.is_file():
        return dict(pickle.loads(tree.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        # The package of the tree, and everything else of this checkout.
        (Path(folder) / "ghostclip").symlink_to(tree.resolve() / "ghostclip")
        out = Path(folder) / "rows"
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]), "GHOSTCLIP_RAILS": str(out)}
        if tests:
            command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "benchmarks.rails", "-n0", *tests]
            subprocess.run(command, cwd=ROOT, env=variables, check=False)
            return _by_test(out)
        command = [sys.executable, "-P", "-m", "benchmarks.rails", "--worker", str(out), "--only", only]
        subprocess.run(command, cwd=ROOT, env=variables, check=True)
        return dict(pickle.loads(out.read_bytes()))


def _by_test(file: Path) -> dict[str, Row]:
    found: dict[str, set[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        test, what = json.loads(line)
        found.setdefault(test, set()).add(what)
    return {test: {"refused": "; ".join(sorted(what))} for test, what in found.items()}


def compared(old: Mapping[str, Row], new: Mapping[str, Row]) -> dict[str, list[str]]:
    """Return what differs between the rows of two checkouts."""
    kinds: dict[str, list[str]] = {
        "accepted, now refused": [],
        "refused, now accepted": [],
        "refused for another reason": [],
        "failed": [],
        "other bits": [],
    }
    for name in sorted({*old, *new}):
        before, now = old.get(name, {}), new.get(name, {})
        was, says = before.get("refused", ""), now.get("refused", "")
        if before.get("failed") != now.get("failed"):
            kinds["failed"].append(f"{name}: {before.get('failed', 'ran')} | {now.get('failed', 'ran')}")
        elif says and not was:
            kinds["accepted, now refused"].append(f"{name}: {says}")
        elif was and not says:
            kinds["refused, now accepted"].append(f"{name}: {was}")
        elif was != says:
            kinds["refused for another reason"].append(f"{name}: {was} | {says}")
        elif "norms" in before and "norms" in now:
            moved = _moved(before, now)
            if moved:
                kinds["other bits"].append(f"{name}: {moved}")
    return kinds


def _moved(before: Row, now: Row) -> str:
    """Return how far norms and sums of one row lie apart; '' where every bit is the same."""
    pairs = {"norms": (before["norms"], now["norms"]), "sum": tuple(map(_flat, (before["sums"], now["sums"])))}
    apart = {
        what: float("inf") if one.shape != two.shape else float((one - two).norm() / one.norm().clamp(min=1e-300))
        for what, (one, two) in pairs.items()
        if not (one.shape == two.shape and torch.equal(one, two))
    }
    return ", ".join(f"{what} by {much:.1e}" for what, much in apart.items())


def _flat(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(sums.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two checkouts, and print what differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rails", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tree", type=Path, nargs="*", help="a checkout or a kept file; then another (default: this)")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--tests", nargs="+", default=[], help="compare what these tests refuse, in place of cases")
    parser.add_argument("--keep", type=Path, help="folder for the rows of each tree")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        given.worker.write_bytes(pickle.dumps(dict(rows(given.only))))
        return 0
    if not 1 <= len(given.tree) <= 2:
        parser.error("name one checkout to compare with this one, or two")
    trees = [*given.tree, ROOT][:2]
    found = [done_by(tree, given.only, given.tests) for tree in trees]
    for tree, rows_of in zip(trees, found, strict=True):
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            (given.keep / f"{tree.resolve().name}.rows").write_bytes(pickle.dumps(rows_of))
    kinds = compared(*found)
    print(f"{len(found[0])} and {len(found[1])} rows; " + "; ".join(f"{kind}: {len(of)}" for kind, of in kinds.items()))
    for kind, lines in kinds.items():
        print("".join(f"\n{kind}:\n" + "\n".join(lines) + "\n" if lines else ""), end="")
    return int(any(kinds.values()))


if __name__ == "__main__":
    sys.exit(main())
