"""Measure every known architecture, each in a process of its own, and write a table.

A crash or a hang of one is a row of the table, not its end.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from importlib.metadata import version

import torch

from benchmarks.architectures.one import send_row
from benchmarks.architectures.report import markdown
from benchmarks.harness import CPU, describe, parser, write
from tests.architectures.known import ALL
from tests.architectures.table import Architecture

_SECONDS_EACH = 300
_PRELOADED = [
    "benchmarks.architectures.one",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
]


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
    options = parser("benchmarks.architectures", __doc__)
    options.add_argument("--only", action="append", help="only architectures whose name contains this; repeatable")
    given = options.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    started = time.monotonic()
    rows = []
    for architecture in ALL:
        if given.only and not any(part in architecture.name for part in given.only):
            continue
        rows.append(_measured(architecture))
        print(rows[-1]["name"], rows[-1].get("error", rows[-1].get("refused", rows[-1].get("failed"))), file=sys.stderr)
    about = describe(CPU)
    report = {
        "command": "python -m benchmarks.architectures",
        "seconds": time.monotonic() - started,
        "own_seconds": sum(row.get("seconds", 0.0) for row in rows),
        "machine": {**about, "versions": {**about["versions"], "transformers": version("transformers")}},
        "rows": rows,
    }
    write(given.out, "architectures", report, markdown(report))
    wrong = [row["name"] for row in rows if "failed" in row or row.get("error", 0.0) > 1e-10]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
