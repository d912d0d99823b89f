"""Write the committed results into the README: `python -m benchmarks.readme` (`--check` only compares)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.architectures.report import OTHERS
from benchmarks.cases.report import summary
from benchmarks.headline import headline

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- {name}: written by `python -m benchmarks.readme`, do not edit -->"
END = "<!-- {name}: end -->"
REPORTS = ("report-cpu.json", "report-cuda.json")


def measured() -> str:
    """The README's measured part.

    Returns:
        Markdown made from every committed report; a sentence in its place where there is none.
    """
    parts = []
    for name in REPORTS:
        path = RESULTS / name
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            stem = path.with_suffix("").relative_to(ROOT).as_posix()
            parts.append(
                f"{headline(report)}\nEvery engine on every model: [{path.stem}.md]({stem}.md), made from "
                f"[{name}]({stem}.json).\n\n![{path.stem}]({stem}.png)\n"
            )
    parts += [_linked(path) for path in sorted(RESULTS.glob("*-cpu.md")) + sorted(RESULTS.glob("*-cuda.md"))]
    return "\n".join(part for part in parts if part) or "No run is committed yet: `python -m benchmarks` makes one.\n"


def _linked(path: Path) -> str:
    """A line for a further report: curves over T and B, largest batches, large models on a GPU."""
    shown = {"scaling": "Curves over T and B", "capacity": "Largest batch under a cap", "large": "Large models"}
    title = shown.get(path.stem.rpartition("-")[0])
    return f"{title}: [{path.name}]({path.relative_to(ROOT).as_posix()}).\n" if title else ""


def cases() -> str:
    """The README's table of supported cases.

    Returns:
        Markdown made from the committed results of the cases and of the architectures.
    """
    path = RESULTS / "cases.json"
    if not path.exists():
        return "No run is committed yet: `python -m benchmarks.cases` makes one.\n"
    about = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"{summary(about['cases'])}\nError: of the clipped sum against one-sample autograd in float64, the largest of "
        "four strategies. Move: by how much leaving one sample out moves the sum, over the bound. Each case, and how "
        "its parameters were handled: [cases.md](benchmarks/results/cases.md).\n"
    )


def architectures() -> str:
    """What the README says of known architectures.

    Returns:
        A sentence made from the committed results.
    """
    path = RESULTS / "architectures.json"
    if not path.exists():
        return "No run is committed yet: `python -m benchmarks.architectures` makes one.\n"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    exact = [row for row in rows if row.get("error", 1.0) <= 1e-10]
    refused = [row for row in rows if "refused" in row]
    opacus = [
        sum(row["opacus"][way].get("error", 1.0) <= OTHERS for row in exact if "opacus" in row) for way in _OPACUS
    ]
    compared = sum("opacus" in row for row in exact)
    return (
        f"Of {len(rows)} architectures (transformers, vision, audio, multimodal, mixtures of experts, state-space and "
        f"linear-attention models), built small with random weights, {len(exact)} are clipped exactly as they are and "
        f"{len(refused)} are refused by name. Opacus is exact (to {OTHERS:g}) on {opacus[0]} (hooks) and {opacus[1]} "
        f"(ghost) of the {compared} where both were run: [architectures.md](benchmarks/results/architectures.md).\n"
    )


_OPACUS = ("hooks", "ghost")
BLOCKS: dict[str, Callable[[], str]] = {"benchmarks": measured, "cases": cases, "architectures": architectures}


def rewritten(text: str) -> str:
    """Put each block between its marks.

    Args:
        text: The README.

    Returns:
        The README with the blocks of now.

    Raises:
        ValueError: If the README does not hold all marks.
    """
    for name, block in BLOCKS.items():
        first, last = BEGIN.format(name=name), END.format(name=name)
        before, begin, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not (begin and end):
            raise ValueError(f"{README.name} lacks the line {first!r} or {last!r}")
        text = f"{before}{first}\n\n{block()}\n{last}{after}"
    return text


def main() -> int:
    """Rewrite the README, or compare.

    Returns:
        The exit status: 1 if `--check` found a difference.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if something would change")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = rewritten(text)
    if options.check:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
