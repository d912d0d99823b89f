"""Tests, kernels, the report and large models on a GPU, within a budget of time: `python -m benchmarks.gpu --help`.

Every stage is a process with its own limit and writes its own files as it goes; a stage that fails or is cut short does
not keep the next one from running.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.files import RESULTS, head, stem, write

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("bookkeeping", "ghost", "opacus-hooks", "opacus-ghost")


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: Short name.
        arguments: Of Python.
        seconds: It is ended after this time.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float


def stages(device: torch.device, out: Path, *, quick: bool) -> list[Stage]:
    """What is run, the most important first.

    Args:
        device: Where.
        out: Folder for the files.
        quick: Whether small models are meant.

    Returns:
        The stages; kernels only where there is a GPU.
    """
    shared = ("--device", str(device), "--out", str(out), *(["--quick"] if quick else []))
    engines = tuple(part for name in ENGINES for part in ("--engine", name))
    found = [
        Stage("large", ("-m", "benchmarks.gpu.large", *shared), 240.0),
        Stage("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests/kernels" if quick else "tests"), 90.0),
        Stage(
            "report",
            ("-m", "benchmarks", "--task", "gpt", "--task", "resnet", *engines, "--seconds", "8", *shared),
            120.0,
        ),
    ]
    if device.type == "cuda":
        quickly = ("--quick",) if quick else ()
        found.insert(2, Stage("kernels", ("-m", "benchmarks.kernels", "--out", str(out), *quickly), 75.0))
    return found


def run(stage: Stage, seconds: float, log: Path) -> dict[str, object]:
    """Run a stage.

    Args:
        stage: What is run.
        seconds: It is ended after this time.
        log: Receives what it prints.

    Returns:
        Its name, status ("ok", "failed", "cut short") and seconds.
    """
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, *stage.arguments]
        # In a session of its own, so that what the stage started ends with it and holds no memory of the GPU.
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
            # pytest's 5: nothing was selected, as on a machine without a GPU.
            status = "ok" if code == 0 or (stage.name == "tests" and code == 5) else "failed"
        except subprocess.TimeoutExpired:
            status = "cut short"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"stage": stage.name, "status": status, "seconds": round(time.monotonic() - started, 1)}


def main(arguments: list[str] | None = None) -> int:
    """Run every stage.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 1 if a stage failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--stage", action="append", choices=("large", "tests", "kernels", "report"), help="only this")
    parser.add_argument("--quick", action="store_true", help="small models: does it run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device. `--device cpu --quick` shows that everything runs.")
    report = head("benchmarks.gpu", sys.argv[1:] if arguments is None else arguments, device, quick=options.quick)
    report["stages"] = done = []
    options.out.mkdir(parents=True, exist_ok=True)
    name, end = stem("gpu", device, quick=options.quick), time.monotonic() + options.budget
    for stage in stages(device, options.out, quick=options.quick):
        left = end - time.monotonic()
        if (options.stage and stage.name not in options.stage) or left < 1:
            continue
        done.append(run(stage, min(stage.seconds, left), options.out / f"{name}-{stage.name}.log"))
        print(" ".join(str(part) for part in done[-1].values()), flush=True)
        lines = [f"| {row['stage']} | {row['status']} | {row['seconds']} |" for row in done]
        table = "\n".join(["| stage | status | seconds |", "|---|---|---:|", *lines])
        write(options.out, name, report, f"# On a GPU\n\n{table}\n")
    return int(any(row["status"] == "failed" for row in done))


if __name__ == "__main__":
    sys.exit(main())
