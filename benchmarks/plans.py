"""Plans of large models on meshes, and the time to make each: `python -m benchmarks.plans --help`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import RESULTS, head, write
from ghostclip.commands.options import quietly
from ghostclip.scaling import DevicePlan, Mesh, load_planned, plan_devices

# Model, mesh, whether blocks are checkpointed; of devices of 80 GB and 4096 tokens a sample.
PLANS = [
    ("llama-8b", "dp=8", False),
    ("llama-8b", "dp=8,tp=4", False),
    ("llama-70b", "dp=8,tp=8", False),
    ("llama-70b", "dp=8,tp=8", True),
    ("llama-405b", "replicate=2,dp=64,tp=8", True),
]
TOKENS, DEVICE = 4096, 80 * 10**9


def _timed(model: str, mesh: str, *, checkpointing: bool, tokens: int) -> tuple[DevicePlan, float]:
    started = time.perf_counter()
    with quietly(f"planning {model}"):
        planned = load_planned(model, batch_size=2, context_length=tokens, dtype=torch.bfloat16)
        found = plan_devices(planned, mesh=Mesh.parse(mesh), device_bytes=DEVICE, checkpointing=checkpointing)
    return found, time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    """Plan, and write the report.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sample (default: %(default)s)")
    given = parser.parse_args(arguments)
    report: dict[str, Any] = head("benchmarks.plans", arguments or [], torch.device("cpu"), quick=False)
    report["plans"] = []
    text = [
        "# Plans of large models",
        f"`{report['command']}`, torch {torch.__version__}, {report['machine']['cpu']}. Counted on the meta device: no "
        "accelerator took part, and nothing here is a measurement of one.",
    ]
    for model, mesh, checkpointing in PLANS:
        found, seconds = _timed(model, mesh, checkpointing=checkpointing, tokens=given.tokens)
        again = " --checkpointing" if checkpointing else ""
        command = f"ghostclip plan {model} --mesh {mesh} --context-length {given.tokens} --device-memory 80{again}"
        text.append(f"## {model}, {mesh}{', checkpointed' * checkpointing}")
        text.append(f"```\n$ {command}\n{found}\n```\n\nMade in {seconds:.0f} s.")
        report["plans"].append({"command": command, "seconds": seconds, **found.as_dict()})
    write(given.out, "plans", report, "\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
