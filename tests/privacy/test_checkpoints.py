"""A resumed training is the training that was interrupted: parameters, ledger, noise and batches."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.data.batch_memory_manager import BatchMemoryManager
from ghostclip.errors import MissingGradientError, ResumeError
from tests.engine.training import parameters_of, small_data, small_model

DATA = small_data(50)


class Run:
    """A private training with momentum, made from the same options each time."""

    def __init__(self, **options):
        self.engine = PrivacyEngine()
        model = small_model()
        arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": DataLoader(DATA, batch_size=10)}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), **{**arguments, **options}
        )
        self.seen: list[list[float]] = []

    def train(self, batches: int) -> None:
        done = 0
        while done < batches:
            for inputs, targets in self.loader:
                self.seen.append(inputs[:, 0].tolist())
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
                done += 1
                if done == batches:
                    break

    def save(self, place) -> None:
        self.engine.save_checkpoint(path=place, module=self.model, optimizer=self.optimizer)

    def load(self, place, **options):
        return self.engine.load_checkpoint(path=place, module=self.model, optimizer=self.optimizer, **options)


def test_resumed_run_is_the_same_run(tmp_path):
    run, resumed = Run(), Run()
    run.train(3)
    run.save(tmp_path / "run.pt")
    run.train(4)
    resumed.load(tmp_path / "run.pt")
    resumed.train(4)
    assert resumed.seen == run.seen[3:]
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert resumed.engine.accountant.history == run.engine.accountant.history
    assert resumed.engine.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_run_resumed_between_logical_batches_of_physical_ones_is_the_same_run(tmp_path):
    def train(run, logical, *, save_after=None):
        manager = BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer)
        done = 0
        with manager as loader:
            for inputs, targets in loader:
                run.seen.append(inputs[:, 0].tolist())
                nn.functional.cross_entropy(run.model(inputs), targets).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                done += not run.optimizer.last_step_was_virtual
                if done == save_after and not run.optimizer.last_step_was_virtual:
                    run.save(tmp_path / "run.pt")
                    saved.append(len(run.seen))
                if done == logical:
                    return

    saved: list[int] = []
    run, resumed = Run(), Run()
    train(run, 4, save_after=2)
    resumed.load(tmp_path / "run.pt")
    train(resumed, 2)
    assert resumed.seen == run.seen[saved[0] :]
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert resumed.engine.accountant.history == run.engine.accountant.history


def test_checkpoint_holds_plain_values_and_the_models_keys(tmp_path):
    run = Run()
    run.train(1)
    extra = {"epoch": 7}
    run.engine.save_checkpoint(
        path=tmp_path / "run.pt", module=run.model, optimizer=run.optimizer, checkpoint_dict=extra
    )
    assert extra == {"epoch": 7}
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    small_model().load_state_dict(loaded["module_state_dict"])
    returned = Run().load(tmp_path / "run.pt")
    assert returned["epoch"] == 7
    assert "optimizer_state_dict" not in returned


def test_open_files_and_models_without_optimizer():
    run, file = Run(), io.BytesIO()
    run.train(2)
    run.engine.save_checkpoint(path=file, module=run.model)
    file.seek(0)
    resumed = Run()
    resumed.engine.load_checkpoint(path=file, module=resumed.model)
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert len(resumed.engine.accountant) == 2
    file.seek(0)
    with pytest.raises(ResumeError, match="without its optimizer"):
        Run().load(file)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("noise_multiplier", {"noise_multiplier": 0.5}),
        ("max_grad_norm", {"max_grad_norm": 2.0}),
        ("sample_rate", {"data_loader": DataLoader(DATA, batch_size=5)}),
    ],
)
def test_another_mechanism_is_refused_and_nothing_changed(name, options, tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path / "run.pt")
    other = Run(**options)
    before = parameters_of(other.model)
    with pytest.raises(ResumeError, match=name):
        other.load(tmp_path / "run.pt")
    assert torch.equal(parameters_of(other.model), before)
    assert len(other.engine.accountant) == 0


def test_another_mechanism_is_a_new_segment_if_allowed(tmp_path):
    run, other = Run(), Run(noise_multiplier=2.0)
    run.train(2)
    run.save(tmp_path / "run.pt")
    other.load(tmp_path / "run.pt", allow_mechanism_change=True)
    other.train(1)
    assert other.engine.accountant.history == [(1.0, 0.2, 2), (2.0, 0.2, 1)]


def test_no_checkpoint_inside_a_logical_batch(tmp_path):
    run = Run()
    nn.functional.cross_entropy(run.model(DATA.tensors[0]), DATA.tensors[1]).backward()
    with pytest.raises(MissingGradientError, match="not released"):
        run.save(tmp_path / "run.pt")
    assert list(tmp_path.iterdir()) == []


def test_something_else_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ResumeError, match="module_state_dict"):
        Run().load(tmp_path / "other.pt")


class Schedule:
    """Stands for a scheduler: it has a state."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_schedulers_are_saved_and_may_change_the_mechanism(tmp_path):
    run, resumed = Run(), Run()
    run.optimizer.noise_multiplier = 0.9
    run.engine.save_checkpoint(
        path=tmp_path / "run.pt", module=run.model, optimizer=run.optimizer, noise_scheduler=Schedule(5)
    )
    scheduler = Schedule(0)
    resumed.load(tmp_path / "run.pt", noise_scheduler=scheduler)
    assert scheduler.position == 5
    assert resumed.optimizer.noise_multiplier == 0.9
