"""What a first GPU has to answer, within eight minutes: `python -m benchmarks.gpu --help`.

Six stages, ordered by what they decide: does the default path agree with float64 (if not, nothing else is run), which
products and kernels are right and quick, time and memory of two large models beside ordinary and compiled training, a
profile. Every measurement is a process of its own with its own limit; the report is written after every row, so that a
run that is cut short leaves what it measured. Nothing but torch, numpy, scipy and opt_einsum is needed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu.page import markdown
from benchmarks.gpu.rows import Row, read
from benchmarks.gpu.stages import Job, Stage, stages
from benchmarks.harness import head, write

POLL_SECONDS = 0.25
FEWEST_SECONDS = 2.0
WRONG = 2
# Without them something is left out.
OF_USE = ("opacus", "triton", "transformers", "accelerate", "hypothesis", "pytest")


def name_of(device: torch.device, *, quick: bool) -> str:
    """The name of the report's files: of the GPU and not of "cuda", so that two GPUs have two reports."""
    full = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    words = [word for word in full.lower().replace("nvidia", "").replace("-", " ").split() if word]
    return "-".join(["gpu", *words, *(["quick"] if quick else [])])


class Run:
    """Runs stages one after the other and keeps the report on disk."""

    def __init__(self, report: Row, folder: Path, name: str) -> None:
        """Begin."""
        self.report, self._folder, self._name = report, folder, name
        self.report["stages"] = []

    def stage(self, stage: Stage, seconds: float) -> Row:
        """Run the jobs of a stage."""
        began = time.monotonic()
        found: Row = {"name": stage.name, "title": stage.title, "rows": []}
        self.report["stages"].append(found)
        for number, job in enumerate(stage.jobs):
            left = seconds - (time.monotonic() - began)
            before = list(found["rows"])
            if left < FEWEST_SECONDS:
                found["rows"] = [*before, {"case": job.name, "status": "left out", "problem": "no time was left"}]
                continue
            place = self._folder / f"{self._name}-{stage.name}-{number}.rows"
            place.unlink(missing_ok=True)

            def keep(
                rows: list[Row],
                before: list[Row] = before,
                found: Row = found,  # bound now, not when called
            ) -> None:
                found["rows"] = [*before, *_latest(rows)]
                found["seconds"] = round(time.monotonic() - began, 1)
                self.write()

            keep([*_run(job, min(left, job.seconds), place, self._log(stage), keep)])
            place.unlink(missing_ok=True)
        found["seconds"] = round(time.monotonic() - began, 1)
        self.write()
        return found

    def _log(self, stage: Stage) -> Path:
        return self._folder / f"{self._name}-{stage.name}.log"

    def write(self) -> None:
        """Write the report."""
        write(self._folder, self._name, self.report, markdown(self.report))


def _latest(rows: list[Row]) -> list[Row]:
    """Rows of which a later one takes the place of an earlier one of the same case."""
    return list({row["case"]: row for row in rows}.values())


def _run(job: Job, seconds: float, place: Path, log: Path, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Run one job; return its rows, the last of which says so if it did not end by itself."""
    arguments = [*job.arguments, *(["--rows", str(place)] if job.writes_rows else [])]
    end, written = time.monotonic() + seconds, -1
    with log.open("ab") as file:
        process = harness.started(arguments, file, {**harness.ENVIRONMENT, **job.environment})
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                if place.exists() and place.stat().st_size != written:
                    written = place.stat().st_size
                    keep(read(place))
        finally:
            cut_short = process.poll() is None
            harness.ended(process)
    return [*read(place), *_remark(job, process.returncode, log, seconds if cut_short else None)]


def _remark(job: Job, code: int, log: Path, cut_after: float | None) -> list[Row]:
    if cut_after is not None:
        return [{"case": job.name, "status": "cut short", "problem": f"not done after {cut_after:.0f} s"}]
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    if job.writes_rows and code == 0:
        return []
    if not job.writes_rows and code in job.good:
        return [{"case": job.name, "status": "ok", "problem": last[:200]}]
    return [{"case": job.name, "status": "failed", "problem": f"ended with {code}: {last}"[:300]}]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.parser("benchmarks.gpu", __doc__)
    parser.add_argument("--device", default="cuda", help="cuda (the default), cuda:1; with --quick also cpu")
    parser.add_argument("--minutes", type=harness.positive, default=8.0, help="for everything; it stops then (8)")
    parser.add_argument("--stage", action="append", help="only this one; may be given several times")
    parser.add_argument("--quick", action="store_true", help="a rehearsal with tiny models: does everything run")
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device. `--device cpu --quick` shows that everything runs.")
    try:
        given.device = harness.device(given.device)
    except argparse.ArgumentTypeError as problem:
        parser.error(f"argument --device: {problem}")
    if given.device.type != "cuda" and not given.quick:
        parser.error(f"on {given.device} the large models take hours: add --quick.")
    there = [stage.name for stage in stages(given.device, quick=given.quick)]
    harness.refuse_unknown(parser, "--stage", given.stage, there)
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run every stage within the time."""
    given = _options(arguments)
    end = time.monotonic() + 60 * given.minutes
    # A run that is ended from outside ends what it started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report: dict[str, Any] = head(
        "benchmarks.gpu", sys.argv[1:] if arguments is None else arguments, given.device, quick=given.quick
    )
    report["minutes"] = given.minutes
    report["missing"] = [name for name in OF_USE if find_spec(name) is None]
    given.out.mkdir(parents=True, exist_ok=True)
    name = name_of(given.device, quick=given.quick)
    run = Run(report, given.out.resolve(), name)
    for stage in stages(given.device, quick=given.quick):
        if given.stage and stage.name not in given.stage:
            continue
        left = end - time.monotonic()
        found = run.stage(stage, min(left, stage.share * 60 * given.minutes))
        said = ", ".join(f"{row['case']}: {row['status']}" for row in found["rows"] if row["status"] != "ok")
        print(f"{stage.name}: {len(found['rows'])} rows, {found['seconds']:.0f} s. {said[:300]}", flush=True)
        if stage.decides and not _holds(found["rows"], stage.decides):
            report["stopped"] = f"after {stage.name}: {stage.decides} failed, so that nothing else is worth measuring"
            run.write()
            break
    print(f"\n{markdown(report)}\nwritten: {given.out / name}.json, .md")
    return status_of(report)


def _holds(rows: list[Row], decisive: str) -> bool:
    """Whether the cases that decide are all right, as far as time sufficed, and there is one."""
    statuses = {row["status"] for row in rows if row["case"].endswith(decisive)}
    return "ok" in statuses and statuses <= {"ok", "cut short", "left out"}


def status_of(report: Row) -> int:
    """The exit status of a report."""
    if "stopped" in report:
        return WRONG
    bad = [row for stage in report["stages"] for row in stage["rows"] if row["status"] in ("failed", "wrong")]
    return int(any(not str(row.get("engine", "")).startswith("opacus") for row in bad))


if __name__ == "__main__":
    sys.exit(main())
