"""Stage 1: does the default path run on this device, and does it agree with one sample at a time in float64?

Every strategy on a small model of every family, then what a single sample may add to a sum: at most C, whatever
precision the user chose for the model's own products and however alike the data are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.correctness import Reference, reference
from benchmarks.engines import STRATEGIES, engines, trainable
from benchmarks.gpu.models import large_models
from benchmarks.gpu.rows import Job, started
from benchmarks.run import checked
from benchmarks.tasks import Task, tasks
from ghostclip import GhostClipper

# How far above C a lone sample's sum may lie: the rounding of the gradient that is left in the parameter's own type.
ABOVE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def _tasks() -> Iterator[Task]:
    small = {task.name: task for task in tasks(quick=True)}
    yield small["gpt"]
    yield from (case.small for case in large_models())
    yield from (small[name] for name in ("cnn", "mlp", "resnet", "lstm"))


def _agree(job: Job, *, compiled: bool) -> None:
    wanted = [engine for engine in engines() if engine.name in STRATEGIES and (engine.name == "graph") == compiled]
    chosen = list(_tasks())[: 3 if job.quick else None]
    references: dict[str, Reference] = {}
    # The default on every model before the next one on any.
    for engine in wanted:
        for task in chosen:
            with job.case(f"{task.name}, {engine.name}") as row:
                expected = references.get(task.name) or reference(task, job.device)
                references[task.name] = expected
                row |= {
                    key: value for key, value in checked(engine, task, job.device, expected).items() if key != "name"
                }


class _Alike(nn.Module):
    """Layers of a width at which the rounding of products shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the last axis to four classes."""
        return self.outer(self.inner(x_BTI).tanh())


def _share_of_bound(job: Job, *, dtype: torch.dtype, alike: bool, strategy: str) -> float:
    """The norm of a lone sample's clipped sum, over C."""
    width, length = (16, 8) if job.quick else (512, 256)
    torch.manual_seed(0)
    model = _Alike(width).to(job.device, dtype)
    x_BTI = torch.ones(1, length, width) if alike else torch.randn(1, length, width)
    clipper = GhostClipper(model, max_grad_norm=1e-3, strategy=strategy)
    logits = model(x_BTI.to(job.device, dtype))
    target = torch.zeros(logits.shape[:2], dtype=torch.int64, device=job.device)
    clipper.backward(F.cross_entropy(logits.transpose(1, 2).float(), target, reduction="none").sum(1))
    squares = [p.grad.double().square().sum() for p in trainable(model) if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) / 1e-3


def _bounded(job: Job) -> None:
    for precision in ("highest", "high", "medium"):
        for dtype, limit in ABOVE.items():
            for alike in (False, True):
                data = "alike" if alike else "random"
                for strategy in ("bookkeeping", "ghost"):
                    name = f"at most C, {str(dtype)[6:]}, precision {precision}, {data} positions, {strategy}"
                    with job.case(name) as row:
                        torch.set_float32_matmul_precision(precision)
                        try:
                            row["error"] = _share_of_bound(job, dtype=dtype, alike=alike, strategy=strategy) - 1
                        finally:
                            torch.set_float32_matmul_precision("highest")
                        row["status"] = "ok" if row["error"] <= limit else "wrong"


def main(given: list[str] | None = None) -> int:
    """Compare, and write a row for every comparison."""
    job = started("benchmarks.gpu.agreement", __doc__, given=given)
    _agree(job, compiled=False)
    _bounded(job)
    # Compiling takes as long as all the rest.
    _agree(job, compiled=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
