"""`python -m benchmarks.cases`: write `results/cases.json` and `results/cases.md` (a few minutes on one core)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.cases.measure import measure
from benchmarks.cases.report import details, summary
from benchmarks.harness import describe
from tests.cases import ALL_CASES

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Measure all cases and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=__doc__)
    parser.add_argument("--only", default="", help="measure only cases whose name holds this, and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    rows = []
    for case in (case for case in ALL_CASES if options.only in case.name):
        rows.append(measure(case))
        print(f"{case.name}: {rows[-1].get('refused') or rows[-1]['errors']}", flush=True)
    wrong = [row["name"] for row in rows if "refused" not in row and max(row["errors"].values()) > 1e-5]
    if not options.only:
        about = {"machine": describe(torch.device("cpu")), "cpu_s": round(time.process_time() - begun, 1)}
        (RESULTS / "cases.json").write_text(json.dumps({**about, "cases": rows}, indent=1) + "\n", encoding="utf-8")
        heading = f"# Cases\n\nWritten by `python -m benchmarks.cases` in {about['cpu_s']:.0f} s of one core.\n"
        legend = (
            "Errors: of the clipped sum against one-sample autograd in float64, relative. Move / C: by how much "
            "leaving one sample out moves the sum, over the bound; at most 1.\n"
        )
        text = "\n".join([heading, legend, summary(rows), details(rows)])
        (RESULTS / "cases.md").write_text(text, encoding="utf-8")
    print(f"{len(rows)} cases, wrong: {wrong or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
