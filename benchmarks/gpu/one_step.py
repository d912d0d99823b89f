"""Stage 6: what a step of a large model spends its time on, what a release adds, and how many samples nearly cancel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.large import _made_on
from benchmarks.gpu.models import large_model, large_models
from benchmarks.gpu.rows import Job, started
from benchmarks.tasks import per_sample_losses
from benchmarks.timing import synchronize, wall
from ghostclip import GhostClipper, PrivacyEngine
from ghostclip.clipping.norms import GroupNorms

SHOWN = 15
STEPS = 5
RELEASES = 3


class _Training:
    """A model with a clipper, stepped without and with a release."""

    def __init__(self, job: Job) -> None:
        case = large_model(job.arguments.case)
        task = case.quick if job.quick else case.task
        task = replace(task, make_model=partial(_made_on, job.device, task.make_model))
        self.device, self.title, self.samples = job.device, task.title, task.batch_size
        self.model, self.batch = task.model(job.device), task.batch(job.device)
        self.clipper = GhostClipper(self.model, max_grad_norm=1.0)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.clipper.backward(per_sample_losses(self.model, self.batch))


def _device_seconds(event: Any) -> float:
    """Of a kernel: its name in torch changed with 2.5."""
    return float(getattr(event, "self_device_time_total", getattr(event, "self_cuda_time_total", 0.0))) / 1e6


def _profiled(job: Job, training: _Training) -> None:
    with job.case(f"profile of a step, {training.title}") as row:
        for _ in range(STEPS):
            training.step()
        synchronize(job.device)
        cuda = [ProfilerActivity.CUDA] if job.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as seen:
            training.step()
            synchronize(job.device)
        events = seen.key_averages()
        on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
        row["launches"] = sum(event.count for event in on_device)
        row["device_seconds"] = sum(map(_device_seconds, on_device))
        row["host_seconds"] = sum(event.self_cpu_time_total for event in events) / 1e6
        longest = sorted(on_device or events, key=_device_seconds if on_device else _host_seconds, reverse=True)
        row["longest"] = [
            [event.key[:90], event.count, (_device_seconds if on_device else _host_seconds)(event)]
            for event in longest[:SHOWN]
        ]


def _host_seconds(event: Any) -> float:
    return event.self_cpu_time_total / 1e6


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Yield what grows by one number for each backward whose norms had to be refined: how many nearly cancel."""
    found: list[int] = []
    refine = GroupNorms.refine

    def noted(norms: GroupNorms, exact: GroupNorms, index_D: torch.Tensor) -> torch.Tensor | None:
        ill_B = refine(norms, exact, index_D)
        found.append(int(index_D.numel()))
        return ill_B

    with mock.patch.object(GroupNorms, "refine", noted):
        yield found


def _ill_conditioned(job: Job, training: _Training) -> None:
    with job.case(f"samples whose norms are formed in float64, {training.title}") as row, _counted() as found:
        for _ in range(2):
            training.step()
        row |= {"samples": training.samples, "backwards": 2, "in_float64": sum(found)}


def _released(job: Job, training: _Training) -> None:
    """A release of a whole engine with a ledger on disk: noise, account, the ledger's fingerprint, the update."""
    with job.case(f"one release, {training.title}") as row, TemporaryDirectory() as folder:
        training.clipper.remove()
        inputs, target = (part.cpu().repeat(16, 1) for part in training.batch)
        optimizer: Any
        model, optimizer, *_, loader = PrivacyEngine(ledger=Path(folder) / "ledger").make_private(
            module=training.model,
            optimizer=torch.optim.SGD(training.model.parameters(), lr=1e-3),
            # Poisson batches of half as many on average, so that the largest are no larger than what was measured.
            data_loader=DataLoader(TensorDataset(inputs, target), batch_size=max(1, training.samples // 2)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        taken = []
        for batch, _ in zip(loader, range(RELEASES), strict=False):
            optimizer.zero_grad()
            on_device = batch[0].to(job.device), batch[1].to(job.device)
            optimizer.clipper.backward(per_sample_losses(model, on_device))
            taken.append(wall(optimizer.step, job.device))
        row.update(seconds=taken[-1], first_seconds=taken[0])
        row["parameters"] = sum(p.numel() for p in training.model.parameters())


def main(given: list[str] | None = None) -> int:
    """Profile, release and count."""
    own: tuple[str, dict[str, Any]] = ("--case", {"choices": [case.name for case in large_models()], "required": True})
    job = started("benchmarks.gpu.one_step", __doc__, own, given=given)
    training = None
    with job.case("a model for one step") as row:
        training = _Training(job)
        row["title"] = training.title
    if training is not None:
        _ill_conditioned(job, training)
        _profiled(job, training)
        _released(job, training)
    return 0


if __name__ == "__main__":
    sys.exit(main())
