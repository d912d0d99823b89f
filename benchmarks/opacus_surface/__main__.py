"""Compare the surfaces, run scripts with both packages, write the tables: `python -m benchmarks.opacus_surface`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.opacus_surface import outcomes
from benchmarks.opacus_surface.table import markdown, report, rows

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Compare, run, write, and fail if a name is unaccounted for or a script fails here.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opacus_surface", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import opacus

        found = rows(opacus)
        scripts = outcomes.plain(outcomes.pairs())
    about = {
        "command": " ".join(["python -m benchmarks.opacus_surface", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "opacus": opacus.__version__,
        "machine": machine.describe(torch.device("cpu")),
    }
    result = {**report(found, about), "scripts": scripts}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "opacus-surface.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (options.out / "opacus-surface.md").write_text(markdown(result))
    missing = [row.path for row in found if row.status == "unaccounted"]
    sys.stdout.write(f"{result['counts']}\n" + "".join(f"unaccounted: {path}\n" for path in missing))
    failing = [row for row in scripts if row["status"].startswith("fails")]
    sys.stdout.write("".join(f"{row['status']}: {row['script']}: {row['remark']}\n" for row in failing))
    return 1 if missing or failing else 0


if __name__ == "__main__":
    raise SystemExit(main())
