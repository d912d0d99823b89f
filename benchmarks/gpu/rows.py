"""Rows of a stage: written one by one as they come, read by the program that started the stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.engines import CannotDo
from benchmarks.harness import short_of_memory

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a process of a stage was started with.

    Attributes:
        device: Where it runs.
        quick: Whether tiny sizes are meant: does it run, not how fast.
        rows: The file that rows are appended to.
        arguments: All options, those of the stage's own included.
    """

    device: torch.device
    quick: bool
    rows: Path
    arguments: argparse.Namespace

    def write(self, row: Row) -> None:
        """Append a row, which from then on outlives this process."""
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    @contextmanager
    def case(self, name: str) -> Iterator[Row]:
        """Write one row when the block ends, whatever it raises: memory that runs out is a result as well."""
        row: Row = {"case": name, "status": "ok"}
        try:
            yield row
        except CannotDo as problem:
            row |= {"status": "cannot", "problem": str(problem)}
        except Exception as problem:  # noqa: BLE001 - whatever a compiler, driver or allocator raises is a result
            status = "out of memory" if short_of_memory(problem) else "failed"
            row |= {"status": status, "problem": f"{type(problem).__name__}: {problem}"[:300]}
        self.write(row)


def started(program: str, description: str | None, *own: tuple[str, dict[str, Any]], given: list[str] | None) -> Job:
    """Read the command line of a stage's process."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run")
    parser.add_argument("--rows", type=Path, default=Path("/dev/null"), help="append rows of JSON to this file")
    for name, options in own:
        parser.add_argument(name, **options)
    arguments = parser.parse_args(given)
    harness.exact_float32()
    return Job(arguments.device, arguments.quick, arguments.rows, arguments)


def read(place: Path) -> list[Row]:
    """The rows that were written so far."""
    if not place.exists():
        return []
    lines = place.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
