"""The training that is audited: a tiny model made private, that releases steps on given batches and never learns.

Shape suffixes: B samples, P entries of all parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import ghostclip

BOUND, EXPECTED, SIGMA, DELTA = 0.25, 4, 1.0, 1e-5
FEATURES, HIDDEN, CLASSES, RECORDS = 4, 5, 3, 8
CLAIMED_EPSILON = 4.3772
"""Of one step with σ = 1 on the whole data, at δ = 1e-5, rounded up."""

LOSS_SHAPES = ("per_sample", "mean", "sum")


class Batch(NamedTuple):
    """Records: inputs of shape [B, FEATURES], labels of shape [B]."""

    x: Tensor
    y: Tensor

    def with_record(self, record: Batch) -> Batch:
        """The neighbouring batch with one more record."""
        return Batch(torch.cat((self.x, record.x.to(self.x))), torch.cat((self.y, record.y)))


def records(count: int = RECORDS, *, seed: int = 0) -> Batch:
    """Ordinary records, with gradients far above the bound."""
    stream = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(count, FEATURES, generator=stream)
    return Batch(x, torch.randint(CLASSES, (count,), generator=stream))


def adversarial_records() -> dict[str, Batch]:
    """One record each that an attacker would add."""
    usual = records()
    x, y = usual.x[:1], usual.y[:1]
    other = (y + 1) % CLASSES
    return {
        "ordinary": Batch(torch.tensor([[1.5, -1.5, 1.5, 1.5]]), torch.tensor([2])),
        "huge": Batch(1e4 * x, other),
        "largest": Batch(x / x.norm() * 1e18, other),
        "tiny": Batch(1e-6 * x, y),
        "zero": Batch(0 * x, y),
        "opposite": Batch(-x, other),
        "duplicate": Batch(x, y),
        "duplicate with another label": Batch(x, other),
        "NaN": Batch(torch.full_like(x, math.nan), y),
        "one NaN": Batch(x + torch.tensor([0.0, math.nan, 0.0, 0.0]), y),
        "infinite": Batch(torch.full_like(x, math.inf), y),
        "minus infinite": Batch(x - torch.tensor([math.inf, 0.0, 0.0, 0.0]), y),
    }


class Subject:
    """A private optimizer around a small model; its learning rate is 0, so every step starts from the same weights.

    Args:
        sigma: Noise multiplier.
        strategy: Clipping strategy.
        loss: One of `LOSS_SHAPES`.
        seed: What the noise follows from, so that a statistical bound cannot fail by chance; None for fresh noise.
        dtype: Of the model.
    """

    def __init__(
        self,
        *,
        sigma: float = SIGMA,
        strategy: str = "hooks",
        loss: str = "per_sample",
        seed: int | None = 7,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LeakyReLU(0.3), nn.Linear(HIDDEN, CLASSES))
        self.loss, self.dtype = loss, dtype
        self.engine = ghostclip.PrivacyEngine()
        model = layers.to(dtype)
        made = quietly(
            self.engine.make_private,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            # Batches are handed over by hand, each with all records.
            data_loader=ghostclip.DeclaredSampling(
                sample_rate=1.0, expected_batch_size=EXPECTED, num_units=EXPECTED, kind="full"
            ),
            noise_multiplier=sigma,
            max_grad_norm=BOUND,
            loss_reduction="sum" if loss == "sum" else "mean",
            criterion=nn.CrossEntropyLoss(reduction="sum" if loss == "sum" else "mean"),
            noise_generator=None if seed is None else torch.Generator().manual_seed(seed),
            grad_sample_mode=strategy,
        )
        self.model, self.optimizer = made[0], made[1]
        self.criterion = made[2] if len(made) == 4 else None

    def backward(self, batch: Batch) -> None:
        """Forward and backward, with the loss in the shape that is asked for."""
        output = self.model(batch.x.to(self.dtype))
        if self.loss == "per_sample":
            losses_B = nn.functional.cross_entropy(output, batch.y, reduction="none")
            self.optimizer.clipper.backward(losses_B)
        elif self.criterion is not None:
            self.criterion(output, batch.y).backward()
        else:
            empty = self.loss == "mean" and len(batch.y) == 0
            reduction = "sum" if empty else self.loss
            nn.functional.cross_entropy(output, batch.y, reduction=reduction).backward()

    def release(self, *batches: Batch) -> list[Tensor]:
        """One step, whose gradient is accumulated over the batches: every parameter's noisy sum, float64."""
        self.optimizer.zero_grad()
        for batch in batches:
            self.backward(batch)
        quietly(self.optimizer.step)
        divisor = 1 if self.loss == "sum" else EXPECTED * max(1, len(batches))
        return [p.grad.double() * divisor for p in self.optimizer.params]

    def noise(self) -> list[Tensor]:
        """A step on a batch without records, which needs no backward: noise alone."""
        self.optimizer.zero_grad()
        self.optimizer.clipper.mark_empty_batch()
        quietly(self.optimizer.step)
        return [p.grad.double() * EXPECTED for p in self.optimizer.params]

    def vector(self, *batches: Batch) -> Tensor:
        """The same as one vector [P]."""
        return torch.cat([g.flatten() for g in self.release(*batches)])


def quietly(call, *args, **options):
    """Call without the warnings about what these audits do on purpose: no noise, a seed, several backwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return call(*args, **options)


def distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """How far apart two releases are, in units of C; NaN and infinity count as infinitely far."""
    moved = torch.cat([(a - b).flatten() for a, b in zip(first, second, strict=True)]).norm().item() / BOUND
    return moved if math.isfinite(moved) else math.inf
