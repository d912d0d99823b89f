"""Drive every row of the table of compatibility and write it: `python -m benchmarks.integrations`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, head, write
from benchmarks.integrations.report import markdown
from tests.integrations.table import Row, all_rows, outcome_of

HOSTS = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "lightning", "timm", "bitsandbytes")


def main(arguments: list[str] | None = None) -> int:
    """Drive the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.integrations", description=__doc__)
    parser.add_argument("--only", default="", help="drive only rows whose name holds this, and write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    words = sys.argv[1:] if arguments is None else arguments
    report = head("benchmarks.integrations", words, torch.device("cpu"), quick=False)
    rows = [_driven(made) for made in all_rows() if options.only in made.name]
    hosts = {name: _version(name) for name in HOSTS}
    report |= {"hosts": hosts, "seconds": time.monotonic() - begun, "rows": rows}
    if not options.only:
        print(f"written: {write(options.out, 'integrations', report, markdown(report))}.json, .md")
    return int(any(row["found"] == "wrong" for row in rows))


def _driven(made: Row) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome_of(made, Path(folder))
    print(f"{made.name}: {found.outcome}{' - ' + found.said if found.outcome == 'wrong' else ''}", flush=True)
    return {
        "tool": made.tool,
        "feature": made.feature,
        "expected": made.outcome,
        "found": found.outcome,
        "said": found.said.replace(folder, "…"),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
