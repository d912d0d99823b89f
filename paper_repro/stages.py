"""Memory of an MLP by stage of a training step, as Opacus's blog shows it: `python -m paper_repro.stages --help`.

Each figure is the peak during a stage above what was held when it began, in a process that holds nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.engines import Engine
from benchmarks.harness import exact_float32, in_new_process, tells_peaks
from benchmarks.tasks import Task
from ghostclip._memory import PeakMemory
from paper_repro.cases import Size
from paper_repro.limits import SHARE_OF_FREE, cap, free_bytes, reason
from paper_repro.measure import MAX_GRAD_NORM, say
from paper_repro.trainers import trainers

STAGES = ("to device", "forward", "backward", "step")
WIDTHS = {"tiny": (64, 32, 16), "small": (5120, 2560, 1280), "full": (5120, 2560, 1280)}
BATCH_SIZES = {"tiny": (8,), "small": (32, 1024), "full": (32, 131_072)}
SIGMA = 1.0
MB = 2**20


def mlp_task(size: Size, batch_size: int) -> Task:
    """The two linear layers of the blog, whose figures leave no room for an activation's memory between them.

    Args:
        size: How wide they are.
        batch_size: Samples.

    Returns:
        The task; as published, 16,387,840 parameters, 62.5 MB.
    """
    features, width, classes = WIDTHS[size]
    return Task(
        f"mlp-{batch_size}",
        f"MLP {features}-{width}-{classes}, B {batch_size}",
        batch_size,
        lambda: nn.Sequential(nn.Linear(features, width), nn.Linear(width, classes)),
        lambda samples: (torch.randn(samples, features), torch.randint(0, classes, (samples,))),
    )


def _peak_above(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work gave, and MB of its peak above what was held before."""
    given: list[Any] = []
    gc.collect()
    peak = PeakMemory(device).above(lambda: given.append(work()))
    return given[0], peak / MB


def _measure(engine: Engine, task: Task, device: torch.device) -> dict[str, float]:
    batch = task.batch(device)
    model, loaded = _peak_above(device, lambda: task.model(device))
    trainer: Any = engine.attach(model, MAX_GRAD_NORM)
    loss, forward = _peak_above(device, lambda: trainer.loss(batch))
    _, backward = _peak_above(device, partial(trainer.backward, loss))
    _, step = _peak_above(device, lambda: trainer.timed_update(device))
    return dict(zip(STAGES, (loaded, forward, backward, step), strict=True))


def _in_this_process(name: str, size: Size, batch_size: int, device: torch.device) -> dict[str, Any]:
    engine = next(engine for engine in trainers(sigma=SIGMA) if engine.name == name)
    _measure(engine, mlp_task("tiny", 4), device)
    limit = cap(SHARE_OF_FREE * (free_bytes() or 0), device) if device.type == "cpu" else nullcontext()
    try:
        with limit:
            return {"megabytes": _measure(engine, mlp_task(size, batch_size), device)}
    except Exception as problem:  # noqa: BLE001 - whatever an engine raises is a result
        return {"problem": reason(problem)}


def measured(size: Size, device: torch.device, only: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Measure all engines.

    Args:
        size: How wide the MLP is, and which batches it gets.
        device: Where it runs.
        only: Names of the private engines wanted; empty for all.

    Yields:
        For each batch size its title and a row for each engine.
    """
    if not tells_peaks(device):
        say("memory by stage: this system does not let a process forget its peak; left out")
        return
    for batch_size in BATCH_SIZES[size]:
        title = mlp_task(size, batch_size).title
        say(f"== {title}: memory by stage")
        rows = []
        for engine in trainers(sigma=SIGMA):
            if engine.private and only and engine.name not in only:
                continue
            arguments = [engine.name, "--size", size, "--batch-size", str(batch_size), "--device", str(device)]
            found = in_new_process("paper_repro.stages", arguments)
            if "process_problem" in found:
                found = {"problem": found["process_problem"]}
            rows.append({"name": engine.name, "title": engine.title, **found})
            say(f"   {engine.title}: {found}")
        yield {"title": title, "batch_size": batch_size, "engines": rows}


def main() -> None:
    """Print one engine's memory by stage as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m paper_repro.stages", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--size", choices=tuple(WIDTHS), default="small")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    exact_float32()
    found = _in_this_process(options.engine, options.size, options.batch_size, torch.device(options.device))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
