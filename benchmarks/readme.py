"""Write the committed results into README and docs: `python -m benchmarks.readme` (`--check` only compares)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.architectures.report import OTHERS
from benchmarks.cases import summary
from benchmarks.headline import headline, short_plot, short_table

ROOT = Path(__file__).resolve().parents[1]
HEADLINE = "benchmarks/results/headline-cpu.png"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- {name}: written by `python -m benchmarks.readme`, do not edit -->"
END = "<!-- {name}: end -->"
REPORTS = ("report-cpu.json", "report-cuda.json")


def measured() -> str:
    """The measured part of the docs."""
    parts = []
    for name in REPORTS:
        path = RESULTS / name
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            stem = path.with_suffix("").relative_to(ROOT).as_posix()
            parts.append(
                f"{headline(report)}\nEvery engine on every model: [{path.stem}.md](repo:{stem}.md), made from "
                f"[{name}](repo:{stem}.json).\n\n![{path.stem}](../../{stem}.png)\n"
            )
    return "\n".join(parts) or "No run is committed yet: `python -m benchmarks` makes one.\n"


def cases() -> str:
    """The table of supported cases."""
    path = RESULTS / "cases.json"
    if not path.exists():
        return "No run is committed yet: `python -m benchmarks.cases` makes one.\n"
    about = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"{summary(about['cases'])}\nError: of the clipped sum against one-sample autograd in float64, the largest of "
        "four strategies; all cases are in float64, but for one of the transformers models, which is in float32. "
        "Move: by how much leaving one sample out moves the sum, over the bound. Each case, and how "
        "its parameters were handled: [cases.md](repo:benchmarks/results/cases.md).\n"
    )


def architectures() -> str:
    """What is said of known architectures."""
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
        f"(ghost) of the {compared} where both were run: "
        "[architectures.md](repo:benchmarks/results/architectures.md).\n"
    )


_OPACUS = ("hooks", "ghost")


def short() -> str:
    """The README's few figures."""
    path = RESULTS / REPORTS[0]
    if not path.exists():
        return "No run is committed yet: `python -m benchmarks` makes one.\n"
    source = path.with_suffix(".md").relative_to(ROOT).as_posix()
    return (
        f"{short_table(json.loads(path.read_text(encoding='utf-8')))}\n![time and memory]({HEADLINE})\n\n"
        f"Four modes of Opacus, torch.func, BackPACK and JAX, with the machine: [{path.stem}.md]({source}).\n"
    )


# By page: what stands between which marks.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": short},
    "docs/start/memory-and-speed.md": {"benchmarks": measured},
    "docs/use/supported.md": {"cases": cases, "architectures": architectures},
}


def rewritten(page: str, text: str) -> str:
    """Put each block between its marks."""
    for name, block in PAGES[page].items():
        first, last = BEGIN.format(name=name), END.format(name=name)
        before, begin, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not (begin and end):
            raise ValueError(f"{page} lacks the line {first!r} or {last!r}")
        text = f"{before}{first}\n\n{block()}\n{last}{after}"
    return text


def main() -> int:
    """Rewrite the pages, or compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if something would change")
    options = parser.parse_args()
    differ = False
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        new = rewritten(page, text)
        differ = differ or new != text
        if not options.check:
            (ROOT / page).write_text(new, encoding="utf-8")
    if not options.check and (RESULTS / REPORTS[0]).exists():
        short_plot(json.loads((RESULTS / REPORTS[0]).read_text(encoding="utf-8")), ROOT / HEADLINE)
    return int(options.check and differ)


if __name__ == "__main__":
    sys.exit(main())
