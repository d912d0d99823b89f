"""`python -m benchmarks.audit`: audit this library and its broken twins, and write what was found."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch

from benchmarks.audit.measure import claim, engines, statistics
from benchmarks.audit.report import markdown, picture
from benchmarks.machine import describe

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Measure and write.

    Returns:
        The exit status: 1 if a broken engine went unseen, or the engine as it is did not pass.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="steps of each side of an audit (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=200, help="simulated audits of a kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": f"python -m benchmarks.audit --runs {options.runs} --repeats {options.repeats}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": describe(torch.device("cpu")),
        "runs": options.runs,
        "claim": claim(),
        "engines": engines(options.runs),
        "statistics": statistics(options.repeats),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "audit.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.out / "audit.md").write_text(markdown(report), encoding="utf-8")
    picture(report, options.out / "audit.png")
    whole, *broken = report["engines"]
    passed = not whole["seen_by"] and not whole["contradicted"]
    return 0 if passed and all(row["seen_by"] or row["contradicted"] for row in broken) else 1


if __name__ == "__main__":
    raise SystemExit(main())
