"""Stage 6: the private step as one graph: ordinary training, compiled and not, book-keeping, the graph, CUDA graphs.

GPT-2 large, where products fill the device, the MNIST CNN, where the host is what a step waits for, and LoRA on a Llama
1B. A row is one way: seconds until its second step, compiling included, a median step in turns with the others', and
the bytes that a step takes at most, model included.
"""

from __future__ import annotations

import fcntl
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import ghostclip
from benchmarks.gpu import lora
from benchmarks.gpu.models import large_model
from benchmarks.gpu.rows import Job, Row, started
from benchmarks.models import MnistCNN
from benchmarks.tasks import per_sample_losses
from benchmarks.timing import synchronize, wall
from ghostclip._memory import PeakMemory

ROUNDS: Final = 15
CASES: Final = ("gpt2-large", "mnist-cnn", "lora")
ORDINARY, COMPILED, BOOKKEEPING, GRAPH, CUDA_GRAPHS = WAYS = (
    "ordinary",
    "ordinary, compiled",
    "book-keeping",
    "graph",
    "graph, CUDA graphs",
)


def _case(job: Job) -> tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]:
    """Return what makes the model, and a batch."""
    name, layers, device, quick = job.arguments.case, job.arguments.layers, job.device, job.quick
    if name == "mnist-cnn":
        return MnistCNN, (torch.randn(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device))
    case = large_model("llama-1b" if name == "lora" else name, layers)
    if name == "lora":
        task = lora.fine_tuning(case, quick=quick, quantised=False)
    else:
        task = case.quick if quick else case.task
    inputs, targets = task.batch(device)
    return task.make_model, (inputs, targets)


def _losses(model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    return per_sample_losses(model, (inputs, targets))


def _ordinary(model: Any, batch: tuple[Tensor, Tensor]) -> None:
    _losses(model, *batch).mean().backward()


def way(name: str, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], device: torch.device) -> Any:
    """Return what makes a step, and what drops its gradients."""
    torch.manual_seed(0)
    with device:
        model = make()
    # A rehearsal on a CPU compiles nothing.
    here = device.type == "cuda"
    if name in (ORDINARY, COMPILED):
        run = model if name == ORDINARY else torch.compile(model, backend="inductor" if here else "eager")
        return partial(_ordinary, run, batch), partial(model.zero_grad, set_to_none=True)
    strategy = "bookkeeping" if name == BOOKKEEPING else "graph"
    clipper: Any = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)  # type: ignore[arg-type]
    if name == BOOKKEEPING:
        return lambda: clipper.backward(_losses(model, *batch)), clipper.reset
    mode = "reduce-overhead" if name == CUDA_GRAPHS and here else None
    options = ghostclip.GraphOptions(backend="inductor" if here else "aten", mode=mode, cache=False)
    step = ghostclip.GraphStep(clipper, _losses, options=options)

    def private() -> None:
        step(*batch)
        if step.reasons:
            raise RuntimeError(f"computed eagerly: {next(iter(step.reasons))}")

    return private, clipper.reset


def main(given: list[str] | None = None) -> int:
    """Measure the ways of one case, in turns."""
    own: list[tuple[str, dict[str, Any]]] = [
        ("--case", {"choices": CASES, "required": True}),
        ("--way", {"choices": WAYS, "action": "append", "help": "only these beside the ordinary one; repeatable"}),
        ("--layers", {"type": int, "help": "of GPT-2 or Llama; all of them by default"}),
        ("--lock", {"type": Path, "help": "file that is locked while steps are timed: others may compile meanwhile"}),
    ]
    job = started("benchmarks.gpu.graph", __doc__, *own, given=given)
    make, batch = _case(job)
    title = job.arguments.case + (f", {job.arguments.layers} layers" if job.arguments.layers else "")
    ready: dict[str, tuple[Any, Any, Row]] = {}
    asked, meter = job.arguments.way or WAYS, PeakMemory(job.device)
    for name in [name for name in WAYS if name == ORDINARY or name in asked]:
        found: Row = {}
        with job.case(f"{title}: {name}, first steps") as row:
            began, before = time.perf_counter(), meter.in_use()
            run, drop = way(name, make, batch, job.device)
            for _ in range(2):
                drop()
                run()
            synchronize(job.device)
            row["seconds"] = found["first_seconds"] = time.perf_counter() - began
            drop()
            meter.start()
            run()
            row["peak_bytes"] = found["peak_bytes"] = meter.stop() - before
            drop()
            ready[name] = run, drop, found
    taken: dict[str, list[float]] = {name: [] for name in ready}
    with nullcontext() if job.arguments.lock is None else job.arguments.lock.open("a") as lock:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(2 if job.quick else ROUNDS):
            for name, (run, drop, _) in ready.items():
                drop()
                taken[name].append(wall(run, job.device))
    base = statistics.median(taken[ORDINARY])
    for name, (_, _, found) in ready.items():
        with job.case(f"{title}: {name}") as row:
            median = statistics.median(taken[name])
            row.update({"way": name, "seconds": median, "over_ordinary": median / base, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
