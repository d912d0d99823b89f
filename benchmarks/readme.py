"""Write the committed results into the README: `python -m benchmarks.readme` (`--check` only compares)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report import markdown

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- benchmarks: written by `python -m benchmarks.readme`, do not edit -->"
END = "<!-- benchmarks: end -->"
REPORTS = ("report-cpu.json", "report-cuda.json")


def block() -> str:
    """The README's measured part.

    Returns:
        Markdown made from every committed report; a sentence in its place where there is none.
    """
    parts = []
    for name in REPORTS:
        path = RESULTS / name
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            picture = path.with_suffix(".png").relative_to(ROOT).as_posix()
            parts.append(
                f"{markdown(report)}\nFrom [{name}]({path.relative_to(ROOT).as_posix()}).\n\n![{name}]({picture})\n"
            )
    return "\n".join(parts) or "No run is committed yet: `python -m benchmarks` makes one.\n"


def rewritten(text: str) -> str:
    """Put the block between its marks.

    Args:
        text: The README.

    Returns:
        The README with the block of now.

    Raises:
        ValueError: If the README does not hold both marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{README.name} lacks the line {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{block()}\n{END}{after}"


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
