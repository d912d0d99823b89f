"""Everything that a lent GPU is asked, in one call of at most ten minutes: `python -m benchmarks.gpu.session --help`.

What is not timed runs first, side by side: tests, agreement with float64, NCCL. Then steps that are one graph: GPT-2
large and LoRA on a Llama 1B compile side by side and are timed in turn. Then, one at a time: both eagerly, the
published tables with Opacus beside ours. Each step is a process with its own limit, and what it found is in the folder
as soon as it is there: a step that fails or is cut short stops no other.

    python -m benchmarks.gpu.session --out "$OUT"
    python -m benchmarks.gpu.session --out rehearsal --device cpu --quick --minutes 60
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.gpu.stages import Job

POLL_SECONDS = 0.5
FEWEST_SECONDS = 5.0
# Of what a step printed, in the log that all share.
KEPT = 600_000
# Who is in the tables: the two ways to fit in memory, and Opacus's three.
IN_TABLES = ("bookkeeping", "ghost", "opacus-hooks", "opacus-fast", "opacus-ghost")
# Tables, with the minutes that each is told and the cases of those that have more than fit. On an H100 no case of C and
# D was timed in 0.5 and 0.9 minutes, and some of each other table: those two come first.
TABLES: Sequence[tuple[str, float, Sequence[str]]] = (
    ("C", 1.2, ()),
    ("D", 1.5, ("gpt2", "roberta-large")),
    ("A", 0.8, ("mnist-cnn", "cifar-cnn", "imdb-embedding")),
    ("E", 0.7, ()),
    ("B", 0.5, ()),
    ("A", 0.5, ("imdb-lstm",)),
)
# Limits of a rehearsal, which may have part of a core, over those of a run.
PATIENCE = 20
# What a table takes longer than it is told: importing, checking the first case, a picture.
BESIDE_MINUTES = 0.3


def _shared(device: torch.device, rows: Path, *, quick: bool) -> tuple[str, ...]:
    return "--device", str(device), "--rows", str(rows), *(["--quick"] if quick else [])


def together(device: torch.device, rows: Path, *, quick: bool) -> list[Job]:
    """The steps that are not timed, and run side by side."""
    shared = _shared(device, rows, quick=quick)
    few = ("-k", "linear_3d") if quick else ()
    workers = ("-n", "1" if quick else "14")
    tests = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--device", str(device), *workers)
    return [
        *([Job("tests", (*tests, "-m", "(gpu or cuda) and few", *few), 150.0)] if find_spec("pytest") else []),
        Job("agreement", ("-m", "benchmarks.gpu.agreement", *shared), 110.0),
        Job("ranks", ("-m", "benchmarks.gpu.ranks", *shared), 90.0),
    ]


def compiled(device: torch.device, rows: Path, work: Path, *, quick: bool) -> list[Job]:
    """The steps that compile side by side, for minutes where a model is deep, and are timed in turn."""
    own = ("--lock", str(work / "lock"), "--way", "book-keeping", "--way", "graph")
    shared = (*_shared(device, rows, quick=quick), *own)
    return [
        Job(f"graph {case}", ("-m", "benchmarks.gpu.graph", *shared, "--case", case), 280.0)
        for case in ("gpt2-large", "lora")
    ]


def alone(device: torch.device, rows: Path, tables: Path, *, quick: bool) -> list[Job]:
    """The steps that are timed, the most important first."""
    shared = _shared(device, rows, quick=quick)

    def lora(engine: str, *own: str) -> Job:
        name = " ".join(("lora", engine, *own))
        return Job(name, ("-m", "benchmarks.gpu.lora", *shared, "--engine", engine, *own), 50.0)

    def large(engine: str, kernels: str) -> Job:
        given = ("--case", "gpt2-large", "--engine", engine, "--kernels", kernels)
        return Job(f"gpt2-large {engine} {kernels}", ("-m", "benchmarks.gpu.large", *shared, *given), 45.0)

    def table(letter: str, minutes: float, cases: Sequence[str]) -> Job:
        # Of single layers, Opacus's fast mode is not measured; small sizes have other names.
        engines = [engine for engine in IN_TABLES if letter != "B" or engine != "opacus-fast"]
        chosen = [word for engine in engines for word in ("--engine", engine)]
        chosen += [word for case in cases if not quick or letter == "A" for word in ("--case", case)]
        size = ["--tiny"] if quick else []
        given = ("--device", str(device), *size, "--minutes", str(0.1 if quick else minutes), "--times-only")
        name = " ".join(("table", letter, *cases[:1]))
        command = ("-m", "paper_repro", letter, *given, *chosen, "--out", str(tables / name))
        return Job(name, command, 60 * (minutes + BESIDE_MINUTES))

    opacus = find_spec("opacus") is not None
    return [
        lora("nonprivate"),
        lora("bookkeeping"),
        *([lora("bookkeeping", "--quantised")] if find_spec("bitsandbytes") else []),
        large("nonprivate", "off"),
        large("bookkeeping", "auto"),
        *([large("opacus-ghost", "off")] if opacus else []),
        *(table(*given) for given in TABLES if opacus),
    ]


class Session:
    """Runs steps and keeps what they found in a folder, of a few files."""

    def __init__(self, out: Path, work: Path, head: dict[str, object], *, minutes: float) -> None:
        """Begin."""
        self._out, self.work, self._head = out, work, head
        self._end = time.monotonic() + 60 * minutes
        self._done: list[dict[str, object]] = []

    def run(self, steps: Sequence[Job]) -> None:
        """Run steps side by side, each within its own limit and the time that is left."""
        left = self._end - time.monotonic()
        if left < FEWEST_SECONDS:
            self._done += [{"step": step.name, "status": "left out"} for step in steps]
            self.keep()
            return
        began = time.monotonic()
        with ExitStack() as files:
            running = [(step, self._start(step, files)) for step in steps]
            files.callback(lambda: [harness.ended(process) for _, process in running])
            while running:
                time.sleep(POLL_SECONDS)
                passed = time.monotonic() - began
                for step, process in list(running):
                    over = passed > min(step.seconds, left)
                    if over or process.poll() is not None:
                        harness.ended(process)
                        status: object = "cut short" if over else process.returncode
                        self._done.append({"step": step.name, "status": status, "seconds": round(passed, 1)})
                        running.remove((step, process))
                self.keep()

    def _start(self, step: Job, files: ExitStack) -> subprocess.Popen[bytes]:
        file = files.enter_context((self.work / f"{step.name}.log").open("wb"))
        # As in `benchmarks.gpu`; a table keeps its heap.
        own = step.arguments[1].startswith("benchmarks.gpu")
        return harness.started(step.arguments, file, harness.ENVIRONMENT if own else {})

    def keep(self) -> None:
        """Write what is there: steps, tables, tests, and the end of what each step printed."""
        write = {"steps.json": json.dumps({**self._head, "steps": self._done}, indent=1)}
        tables = sorted(self.work.glob("table */table-*.json"))
        write["tables.json"] = json.dumps({file.parent.name: json.loads(file.read_text()) for file in tables}, indent=1)
        write["tables.md"] = "\n".join(file.with_suffix(".md").read_text() for file in tables)
        logs = sorted(self.work.glob("*.log"), key=lambda file: file.stat().st_mtime)
        ends = {file.stem: file.read_text(encoding="utf-8", errors="replace")[-KEPT:] for file in logs}
        write["tests.txt"] = ends.pop("tests", "")
        write["log.txt"] = "\n".join(f"===== {name}\n{text}" for name, text in ends.items())
        for name, text in write.items():
            (self._out / name).write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run every step within the time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.session", description=__doc__)
    parser.add_argument("--device", type=torch.device, default="cuda", help="cuda (the default), or cpu with --quick")
    parser.add_argument("--minutes", type=harness.positive, default=9.0, help="for everything (default: %(default)s)")
    parser.add_argument("--step", action="append", help="only steps whose name begins so; repeatable")
    parser.add_argument("--quick", action="store_true", help="a rehearsal with tiny sizes: does everything run")
    parser.add_argument("--out", type=harness.folder, required=True, help="folder for the files")
    given = parser.parse_args(arguments)
    # A run that is ended from outside ends what it started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given.out.mkdir(parents=True, exist_ok=True)
    rows = given.out.resolve() / "rows.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        session = Session(given.out, work, harness.describe(given.device), minutes=given.minutes)

        def chosen(steps: Sequence[Job]) -> list[Job]:
            found = [step for step in steps if not given.step or step.name.startswith(tuple(given.step))]
            return [replace(step, seconds=PATIENCE * step.seconds) for step in found] if given.quick else found

        for several in (
            together(given.device, rows, quick=given.quick),
            compiled(given.device, rows, work, quick=given.quick),
        ):
            side_by_side = chosen(several)
            if side_by_side:
                session.run(side_by_side)
        for step in chosen(alone(given.device, rows, work, quick=given.quick)):
            session.run([step])
            print((given.out / "steps.json").read_text()[-300:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
