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

from benchmarks import options
from benchmarks.files import RESULTS, head, stem, write
from benchmarks.report import heading
from ghostclip.kernels import switch

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("bookkeeping", "ghost", "opacus-hooks", "opacus-ghost")


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: Short name.
        arguments: Of Python.
        seconds: It is ended after this time.
        interpreted: Whether Triton interprets its kernels on a CPU.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    interpreted: bool = False


def stages(device: torch.device, out: Path, *, quick: bool) -> list[Stage]:
    """What is run, the most important first.

    Args:
        device: Where.
        out: Folder for the files.
        quick: Whether small models are meant.

    Returns:
        The stages; kernels on a CPU only in a quick run, where Triton interprets them and nothing is timed.
    """
    shared = ("--device", str(device), "--out", str(out), *(["--quick"] if quick else []))
    engines = tuple(part for name in ENGINES for part in ("--engine", name))
    found = [
        Stage("large", ("-m", "benchmarks.gpu.large", *shared), 240.0),
        Stage("tests", ("-m", "pytest", "-q", "-m", "gpu and not slow", "tests/kernels" if quick else "tests"), 90.0),
        Stage(
            "report",
            ("-m", "benchmarks", "--task", "gpt", "--task", "resnet", *engines, "--seconds", "8", *shared),
            120.0,
        ),
    ]
    if device.type == "cuda" or (quick and switch.installed()):
        quickly = ("--quick",) if quick else ()
        kernels = ("-m", "benchmarks.kernels", "--out", str(out), *quickly)
        found.insert(2, Stage("kernels", kernels, 75.0, interpreted=device.type != "cuda"))
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
        environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if stage.interpreted else {})}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
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
    parser.add_argument("--device", default="cuda", help="cuda (the default), cuda:1; with --quick also cpu")
    parser.add_argument(
        "--budget", type=options.positive, default=480.0, help="seconds for everything (default: %(default)s)"
    )
    parser.add_argument("--stage", action="append", choices=("large", "tests", "kernels", "report"), help="only this")
    parser.add_argument("--quick", action="store_true", help="small models: does it run")
    parser.add_argument(
        "--out", type=options.folder, default=RESULTS, help="folder for the files (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device. `--device cpu --quick` shows that everything runs.")
    try:
        device = options.device(given.device)
    except argparse.ArgumentTypeError as problem:
        parser.error(f"argument --device: {problem}")
    if device.type != "cuda" and not given.quick:
        parser.error(f"on {device} the large models take hours: add --quick.")
    report = head("benchmarks.gpu", sys.argv[1:] if arguments is None else arguments, device, quick=given.quick)
    report["stages"] = done = []
    name, end = stem("gpu", device, quick=given.quick), time.monotonic() + given.budget
    for stage in stages(device, given.out.resolve(), quick=given.quick):
        if given.stage and stage.name not in given.stage:
            continue
        left = end - time.monotonic()
        if left < 1:
            done.append({"stage": stage.name, "status": "left out: the budget was spent", "seconds": 0.0})
        else:
            done.append(run(stage, min(stage.seconds, left), given.out / f"{name}-{stage.name}.log"))
        print(" ".join(str(part) for part in done[-1].values()), flush=True)
        lines = [f"| {row['stage']} | {row['status']} | {row['seconds']} |" for row in done]
        table = "\n".join(["| stage | status | seconds |", "|---|---|---:|", *lines])
        write(given.out, name, report, f"# On a GPU\n\n{heading(report)}\n{table}\n")
    return int(any(row["status"] == "failed" for row in done))


if __name__ == "__main__":
    sys.exit(main())
