"""Measure every known architecture, each in a process of its own, and write a table.

A crash or a hang of one is a row of the table, not its end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.architectures.one import send_row
from benchmarks.architectures.report import markdown
from tests.architectures.known import ALL
from tests.architectures.table import Architecture

RESULTS = Path(__file__).resolve().parents[1] / "results"
_SECONDS_EACH = 300
_PRELOADED = [
    "benchmarks.architectures.one",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    parser.add_argument("--only", action="append", help="only architectures whose name contains this; repeatable")
    return parser.parse_args()


def _measured(architecture: Architecture) -> dict[str, object]:
    """Measure one architecture in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=send_row, args=(architecture.name, its))
    process.start()
    its.close()
    try:
        result = ours.recv() if ours.poll(_SECONDS_EACH) else {"failed": f"no answer in {_SECONDS_EACH} s"}
    except EOFError:
        result = {"failed": "the process ended without an answer"}
    process.kill()
    process.join()
    return {"name": architecture.name, "family": architecture.family, **result}


def main() -> int:
    """Run the whole comparison."""
    options = _options()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    started = time.monotonic()
    rows = []
    for architecture in ALL:
        if options.only and not any(part in architecture.name for part in options.only):
            continue
        rows.append(_measured(architecture))
        print(rows[-1]["name"], rows[-1].get("error", rows[-1].get("refused", rows[-1].get("failed"))), file=sys.stderr)
    about = harness.describe(torch.device("cpu"))
    report = {
        "command": "python -m benchmarks.architectures",
        "seconds": time.monotonic() - started,
        "own_seconds": sum(row.get("seconds", 0.0) for row in rows),
        "machine": {**about, "versions": {**about["versions"], "transformers": version("transformers")}},
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "architectures.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.out / "architectures.md").write_text(markdown(report), encoding="utf-8")
    wrong = [row["name"] for row in rows if "failed" in row or row.get("error", 0.0) > 1e-10]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
