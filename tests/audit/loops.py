"""Whole private loops on neighbouring data: the same loader, sampling and loop, and one record zeroed out or not."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.data.physical_batches import BatchMemoryManager
from tests.audit.subject import BOUND, CLASSES, FEATURES, HIDDEN, quietly, records
from tests.engine.training import CountedNoise

RECORDS, BATCH, THE_RECORD, EPOCHS = 12, 6, 7, 6
LOOPS = ("plain", "workers", "physical batches", "left early", "left in the middle")


class Operations(TorchDispatchMode):
    """Notes the name and the shapes of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        self.seen.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


@dataclass
class Trace:
    """What a loop did, apart from the numbers.

    Attributes:
        releases: Every step's gradients, as one vector in units of sums.
        draws: Shape and standard deviation of every noise draw.
        account: The accountant's history.
        operations: Every torch operation with its shapes.
        spoken: Warnings and log lines.
        generators: torch's global generator afterwards.
        sizes: Records in every batch that the loop was handed.
    """

    releases: list[torch.Tensor] = field(default_factory=list)
    draws: list[tuple[tuple[int, ...], float]] = field(default_factory=list)
    account: list[Any] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    spoken: list[str] = field(default_factory=list)
    generators: torch.Tensor | None = None
    sizes: list[int] = field(default_factory=list)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def data(record: torch.Tensor | None) -> TensorDataset:
    """The data with a record at its place, or (None) zeroed out: its loss has weight 0."""
    usual = records(RECORDS)
    x, weight = usual.x.clone(), torch.ones(RECORDS)
    if record is None:
        weight[THE_RECORD] = 0.0
    else:
        x[THE_RECORD] = record
    return TensorDataset(x, usual.y, weight)


def run(
    loop: str, record: torch.Tensor | None, *, sigma: float = 0.0, strategy: str = "auto", dropout: float = 0.2
) -> Trace:
    """Run a loop over six epochs of two batches each, always with the same batches.

    Args:
        loop: One of `LOOPS`.
        record: The record at its place, or None for the data without it.
        sigma: Noise multiplier.
        strategy: Clipping strategy.
        dropout: Of the model.

    Returns:
        What it did.
    """
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.Dropout(dropout), nn.LeakyReLU(0.3), nn.Linear(HIDDEN, CLASSES)
    )
    engine, trace, noise = ghostclip.PrivacyEngine(), Trace(), CountedNoise()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(data(record), batch_size=BATCH, num_workers=2 if loop == "workers" else 0)
    made = quietly(
        engine.make_private,
        module=model,
        optimizer=inner,
        data_loader=loader,
        noise_multiplier=sigma,
        max_grad_norm=BOUND,
        grad_sample_mode=strategy,
    )
    # The two-pass strategies hand back a criterion, too; here losses go to the clipper, one per sample.
    model, optimizer, loader = made[0], made[1], made[-1]
    state = loader.batch_sampler.state_dict()
    loader.batch_sampler.load_state_dict({**state, "key": "0123456789abcdef0123456789abcdef"})
    optimizer.noise_source = noise
    optimizer.register_step_pre_hook(
        lambda *_: trace.releases.append(torch.cat([p.grad.double().flatten() * BATCH for p in optimizer.params]))
    )
    lines, operations = _Lines(trace.spoken), Operations()
    logging.getLogger("ghostclip").addHandler(lines)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with operations:
            _loop(loop, model, optimizer, loader, trace)
    logging.getLogger("ghostclip").removeHandler(lines)
    trace.spoken += [str(warning.message) for warning in caught]
    trace.draws, trace.account = noise.draws, list(engine.accountant.history)
    trace.operations, trace.generators = operations.seen, torch.get_rng_state()
    return trace


def _loop(loop: str, model: nn.Module, optimizer: Any, loader: Any, trace: Trace) -> None:
    for epoch in range(EPOCHS):
        if loop in {"physical batches", "left in the middle"}:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as physical:
                # The first loop ends after one physical batch of several: nothing of it may be released later.
                _steps(model, optimizer, physical, trace, 1 if loop == "left in the middle" and epoch == 0 else None)
        else:
            _steps(model, optimizer, loader, trace, 1 if loop == "left early" and epoch % 2 == 0 else None)


def _steps(model: nn.Module, optimizer: Any, batches: Any, trace: Trace, limit: int | None) -> None:
    for number, (x, y, weight) in enumerate(batches):
        if number == limit:
            break
        trace.sizes.append(len(y))
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        optimizer.clipper.backward(losses * weight)
        optimizer.step()
