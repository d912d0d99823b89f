"""A private training of a small model, which tests of accounts, draws and checkpoints vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ghostclip import PrivacyEngine
from tests.engine.training import small_model

DELTA = 1e-5


class PrivateRun:
    """A private training, made from the same options each time.

    Args:
        data: Records.
        model: Another one than the small one.
        inner: Kind of the optimizer.
        lr: Its learning rate.
        batch_size: Expected.
        sigma: Noise multiplier.
        epsilon: A budget of four passes, in place of the noise multiplier.
        engine: Another one than one of its own.
        ledger: Of its own engine.
        accountant: Of its own engine; the quick one.
        **options: Of `make_private`.
    """

    def __init__(
        self,
        data: Dataset[Any],
        *,
        model: nn.Module | None = None,
        inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        lr: float = 0.1,
        batch_size: int = 10,
        sigma: float = 1.0,
        epsilon: float | None = None,
        engine: PrivacyEngine | None = None,
        ledger: Any = None,
        accountant: str = "rdp",
        **options: Any,
    ) -> None:
        self.engine = PrivacyEngine(ledger=ledger, accountant=accountant) if engine is None else engine
        self.bare = small_model() if model is None else model
        arguments: dict[str, Any] = {
            "module": self.bare,
            "optimizer": inner([p for p in self.bare.parameters() if p.requires_grad], lr=lr),
            "data_loader": DataLoader(data, batch_size=batch_size),
            "max_grad_norm": 1.0,
            **options,
        }
        if epsilon is None:
            made = self.engine.make_private(noise_multiplier=sigma, **arguments)
        else:
            arguments = {"target_delta": DELTA, "epochs": 4, "when_spent": "stop", **arguments}
            made = self.engine.make_private_with_epsilon(target_epsilon=epsilon, **arguments)
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]

    def began(self, states: dict[str, Any] | None = None) -> dict[str, Any]:
        """Go on from states of noise and batches, if some are given; return those that the training begins with."""
        if states is not None:
            self.optimizer.noise_source.load_state_dict(states["noise"])
            self.loader.load_state_dict(states["batches"])
        return {"noise": self.optimizer.noise_source.state_dict(), "batches": self.loader.state_dict()}

    def backward(self, batch: Any) -> None:
        """Forward and backward of the losses of a batch."""
        inputs, targets = batch
        losses = nn.functional.cross_entropy(self.model(inputs), targets, reduction="none")
        self.optimizer.clipper.backward(losses)

    def step(self, batch: Any) -> None:
        """One round of a usual loop."""
        self.optimizer.zero_grad()
        self.backward(batch)
        self.optimizer.step()

    def train(self, steps: int, *, after: Callable[[int], None] | None = None) -> PrivateRun:
        """Release so many steps; `after` is called after each, inside the loop."""
        last = self.optimizer.releases + steps
        while self.optimizer.releases < last:
            for batch in self.loader:
                self.step(batch)
                if after is not None:
                    after(self.optimizer.releases)
                if self.optimizer.releases == last:
                    break
        return self

    def save(self, place: Any, **options: Any) -> Any:
        """Save a checkpoint, and return where."""
        self.engine.save_checkpoint(path=place, module=self.model, optimizer=self.optimizer, **options)
        return place

    def load(self, place: Any, **options: Any) -> Any:
        """Load a checkpoint."""
        return self.engine.load_checkpoint(path=place, module=self.model, optimizer=self.optimizer, **options)

    @property
    def epsilon(self) -> float:
        """Of what has been released."""
        return self.engine.get_epsilon(DELTA)
