"""Stages 4 and 5: one way to train a large model: its time and its memory.

Each way runs in a process of its own. "compiled" is ordinary training with the blocks and the loss compiled, which
takes as long as one block takes to compile.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import NON_PRIVATE, CannotDo, Engine, engines, trainable
from benchmarks.gpu.models import Large, large_model, large_models
from benchmarks.gpu.peaks import flops_of_step, peak_of
from benchmarks.gpu.rows import Row, started
from benchmarks.memory import load_what_a_step_loads, peaks
from benchmarks.tasks import Batch, Task, per_sample_losses
from benchmarks.timing import steps
from ghostclip.kernels import runtime

ROUNDS = 5


class _Compiled:
    """Ordinary training, its blocks and its loss compiled."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        del max_grad_norm
        self.model = model
        # On a CPU, where this is a rehearsal, without the code generation that takes a minute there.
        backend = "inductor" if next(model.parameters()).is_cuda else "aot_eager"
        for block in model.get_submodule("blocks").children():
            block.compile(backend=backend)
        self._losses: Callable[[Tensor, Tensor], Tensor] = torch.compile(_losses_of, backend=backend)

    def step(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        self._losses(self.model(batch[0]), batch[1]).mean().backward()

    def result(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in trainable(self.model)]


def _losses_of(logits: Tensor, target: Tensor) -> Tensor:
    return per_sample_losses(nn.Identity(), (logits, target))


COMPILED = Engine("compiled", "PyTorch, not private, compiled", False, _Compiled)


def ways() -> dict[str, Engine]:
    """The ways by name: ordinary and compiled training, every engine that is here."""
    return {engine.name: engine for engine in [*engines(), COMPILED]}


def _made_on(device: torch.device, make: Callable[[], nn.Module]) -> nn.Module:
    """The weights drawn where they are used: on a CPU, a billion of them takes longer than the measurement."""
    with torch.device(device):
        return make()


def _engine(name: str) -> Engine:
    found = ways().get(name)
    if found is None:
        raise CannotDo("not installed (pip install opacus)" if "opacus" in name else f"no engine is called {name}")
    return found


def _timed(engine: Engine, task: Task, device: torch.device) -> Row:
    batch = task.batch(device)
    runner = engine.attach(task.model(device), 1.0)
    found: Row = dict(peaks(runner, batch, device))
    taken = [steps(runner, batch, device)[0] for _ in range(ROUNDS)]
    return {**found, "batch_size": task.batch_size, "seconds": statistics.median(taken), "rounds": taken}


def _roof(case: Large, task: Task, device: torch.device, *, quick: bool) -> Row:
    """The time of an ordinary step's products at the device's largest rate."""
    with torch.device("meta"):
        model = task.make_model()
    ids_BT, _ = case.small.batch(torch.device("cpu")) if quick else (torch.empty(1, 1024), None)
    flops = flops_of_step(model, task.batch_size, ids_BT.shape[1])
    return {"flops": flops, "roof_seconds": flops / peak_of(device, quick=quick).bf16}


def main(given: list[str] | None = None) -> int:
    """Measure one way."""
    own: list[tuple[str, dict[str, Any]]] = [
        ("--case", {"choices": [case.name for case in large_models()], "required": True}),
        ("--engine", {"default": NON_PRIVATE.name}),
        ("--kernels", {"choices": runtime.MODES, "default": "off"}),
    ]
    job = started("benchmarks.gpu.large", __doc__, *own, given=given)
    chosen, case = job.arguments, large_model(job.arguments.case)
    task = case.quick if job.quick else case.task
    name = f"{task.title}: {chosen.engine}, kernels {chosen.kernels}"
    with job.case(name) as row, runtime.using(chosen.kernels):
        row |= {"engine": chosen.engine, "kernels": chosen.kernels}
        engine = _engine(chosen.engine)
        task = replace(task, make_model=partial(_made_on, job.device, task.make_model))
        if engine is not COMPILED:
            load_what_a_step_loads(engine, case.small, job.device)
        row.update(_timed(engine, task, job.device))
        row.update(_roof(case, task, job.device, quick=job.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
