"""A training with everything in it, saved in the middle and resumed, is the uninterrupted one bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.data.batch_memory_manager import BatchMemoryManager
from ghostclip.optim.schedules import ExponentialNoise, StepGradClip
from paper_repro.examples.data import digits


class Run:
    """Convolutions with dropout, Adam, three schedules, physical batches; made anew in every process of a training."""

    def __init__(self, strategy, weights=5):
        torch.manual_seed(4)
        data = digits(60)
        torch.manual_seed(weights)
        network = nn.Sequential(nn.Conv2d(1, 4, 5, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(256, 10))
        self.engine = PrivacyEngine(accountant="rdp")
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=network,
            optimizer=torch.optim.Adam(network.parameters(), lr=1e-2),
            data_loader=DataLoader(data, batch_size=20),
            noise_multiplier=0.7,
            max_grad_norm=1.0,
            grad_sample_mode=strategy,
        )
        self.rate = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.schedules = {
            "noise_scheduler": ExponentialNoise(self.optimizer, gamma=0.9),
            "grad_clip_scheduler": StepGradClip(self.optimizer, step_size=1, gamma=0.8),
        }

    def epoch(self):
        criterion = nn.CrossEntropyLoss()
        with BatchMemoryManager(data_loader=self.loader, max_physical_batch_size=8, optimizer=self.optimizer) as loader:
            for x, y in loader:
                self.optimizer.zero_grad()
                criterion(self.model(x), y).backward()
                self.optimizer.step()
        for schedule in (self.rate, *self.schedules.values()):
            schedule.step()

    def save(self, path):
        own = {"rate": self.rate.state_dict()}
        self.engine.save_checkpoint(
            path=path, module=self.model, optimizer=self.optimizer, checkpoint_dict=own, **self.schedules
        )

    def load(self, path):
        found = self.engine.load_checkpoint(path=path, module=self.model, optimizer=self.optimizer, **self.schedules)
        self.rate.load_state_dict(found["rate"])

    def state(self):
        """Everything that the training has become."""
        moments = [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        numbers = (
            self.engine.get_epsilon(1e-3),
            self.optimizer.noise_multiplier,
            self.optimizer.max_grad_norm,
            self.rate.get_last_lr(),
            self.loader.state_dict(),
            list(self.engine.accountant.history),
        )
        return [*self.model.state_dict().values(), *moments, torch.get_rng_state()], numbers


@pytest.mark.parametrize("strategy", ["bookkeeping", "hooks"])
def test_resumed_training_is_the_uninterrupted_one(strategy, tmp_path):
    path = tmp_path / "middle.pt"
    straight = Run(strategy)
    straight.epoch()
    straight.save(path)
    straight.epoch()

    # As a new process would: other weights and another place of the generator, until the file is loaded.
    resumed = Run(strategy, weights=99)
    resumed.load(path)
    resumed.epoch()

    (tensors, numbers), (again, others) = straight.state(), resumed.state()
    assert len(tensors) == len(again) > 10
    assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
    assert numbers == others

    unrelated = Run(strategy)
    unrelated.epoch()
    unrelated.epoch()
    assert not torch.equal(unrelated.state()[0][0], tensors[0])


def test_checkpoint_holds_plain_values_only(tmp_path):
    path = tmp_path / "middle.pt"
    run = Run("bookkeeping")
    run.epoch()
    run.save(path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["rate"]["last_epoch"] == 1
    allowed = Run("bookkeeping")
    allowed.engine.load_checkpoint(
        path=path,
        module=allowed.model,
        optimizer=allowed.optimizer,
        torch_load_kwargs={"weights_only": True},
        **allowed.schedules,
    )
    assert torch.equal(allowed.model.state_dict()["0.weight"], run.model.state_dict()["0.weight"])
