"""A resumed run is the uninterrupted run, bit for bit, or it is refused, or it uses randomness that is fresh."""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

import pytest
import torch
from torch import nn

from ghostclip.clipping import policies
from ghostclip.compat.opacus import schedulers
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import MissingGradientError, ResumeError
from ghostclip.privacy.ledger_file import LedgerFile
from tests.cases.table import CPU
from tests.engine.training import parameters_of, small_data
from tests.private_run import PrivateRun

DATA = small_data(50)
OPTIONS = {
    "flat": {},
    "adaptive": {"clipping": "adaptive"},
    "per layer in two passes": {"clipping": "per_layer", "grad_sample_mode": "ghost"},
    "per-sample gradients": {"clipping": "psac", "grad_sample_mode": "hooks"},
}


class Run(PrivateRun):
    """A training with dropout and Adam."""

    def __init__(self, folder=None, lr=0.05, device=CPU, **options):
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3)).to(device)
        ledger = None if folder is None else folder / "ledger"
        super().__init__(DATA, model=model, inner=torch.optim.Adam, lr=lr, ledger=ledger, **options)
        self.device = device

    def backward(self, batch):
        super().backward([part.to(self.device) for part in batch])

    def train_and_save(self, steps, at, place):
        """Release so many steps; save inside the loop after `at` of them."""
        self.train(steps, after=lambda done: self.save(place) if done == at else None)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("at", [3, 5])
def test_resumed_run_equals_the_uninterrupted_one(name, at, device, tmp_path):
    run = Run(device=device, **OPTIONS[name])
    run.train_and_save(at + 9, at, tmp_path / "run.pt")
    torch.rand(13)
    resumed = Run(device=device, **OPTIONS[name])
    resumed.load(tmp_path / "run.pt")
    resumed.train(9)
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert resumed.optimizer.max_grad_norm == run.optimizer.max_grad_norm
    assert resumed.engine.accountant.history == run.engine.accountant.history


def test_checkpoint_holds_the_whole_mechanism_in_plain_values(tmp_path):
    run = Run(tmp_path, clipping="per_layer")
    run.train(2)
    run.save(tmp_path / "run.pt")
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert state["ghostclip_mechanism"] == {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "clipping": {"rule": "flat", "groups": "per_layer"},
        "relation": "zero_out",
        "expected_batch_size": 10.0,
        "loss_reduction": "mean",
        "noise_level": "fast",
        "sampling": "poisson",
        "sample_rate": 0.2,
    }
    assert state["ghostclip_version"] == 5
    assert state["ghostclip_ledger"]["releases"] == state["ghostclip_releases"] == 2
    assert list(state["ghostclip_runs"].values()) == [2]
    assert {"key", "position"} <= state["ghostclip_noise"].keys() & state["ghostclip_sampler"].keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clipping", {"clipping": "automatic"}),
        ("clipping", {"clipping": policies.per_layer([0.5] * 4), "max_grad_norm": None}),
        ("noise_multiplier", {"sigma": 0.9}),
        ("max_grad_norm", {"max_grad_norm": 2.0}),
    ],
)
def test_another_mechanism_is_refused_or_gets_fresh_randomness(name, options, tmp_path):
    run = Run(tmp_path)
    run.train(2)
    run.save(tmp_path / "run.pt")
    run.engine.close()
    with pytest.raises(ResumeError, match=name):
        Run(tmp_path, **options).load(tmp_path / "run.pt")
    other = Run(tmp_path, **options)
    own = other.optimizer.noise_source.state_dict()["key"]
    other.load(tmp_path / "run.pt", allow_mechanism_change=True)
    assert other.optimizer.noise_source.state_dict()["key"] == own != run.optimizer.noise_source.state_dict()["key"]
    assert other.loader.state_dict()["key"] != run.loader.state_dict()["key"]
    other.train(2)
    assert len(other.engine.accountant) == 4
    assert (tmp_path / "ledger").read_text().count('"mechanism"') == 2


def test_steps_made_again_cost_nothing_and_steps_that_come_out_otherwise_are_refused(tmp_path):
    run = Run(tmp_path)
    run.train_and_save(5, 2, tmp_path / "run.pt")
    run.engine.close()
    resumed = Run(tmp_path)
    resumed.load(tmp_path / "run.pt")
    assert len(resumed.engine.accountant) == 5
    resumed.train(3)
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert len(resumed.engine.accountant) == len(LedgerFile(tmp_path / "ledger").entries) == 5
    resumed.train(1)
    assert len(resumed.engine.accountant) == 6
    resumed.engine.close()

    other = Run(tmp_path)
    other.load(tmp_path / "run.pt")
    other.model.get_parameter("_module.0.weight").data.add_(0.01)
    before = parameters_of(other.model)
    with pytest.raises(ResumeError, match="bit for bit"):
        other.train(1)
    assert torch.equal(parameters_of(other.model), before)


def test_fresh_randomness_counts_the_lost_steps(tmp_path):
    run = Run(tmp_path)
    run.train_and_save(5, 2, tmp_path / "run.pt")
    run.engine.close()
    resumed = Run(tmp_path, lr=0.01)
    resumed.load(tmp_path / "run.pt", fresh_randomness=True)
    resumed.train(3)
    assert len(resumed.engine.accountant) == 8
    assert not torch.equal(parameters_of(resumed.model), parameters_of(run.model))


@pytest.mark.filterwarnings("ignore:.*follows from an explicit")
def test_fresh_randomness_from_the_same_seed_is_refused(tmp_path):
    run = Run(noise_generator=torch.Generator().manual_seed(3))
    run.save(tmp_path / "run.pt")
    again = Run(noise_generator=torch.Generator().manual_seed(3))
    with pytest.raises(ResumeError, match="same noise"):
        again.load(tmp_path / "run.pt", fresh_randomness=True)


def test_lost_ledger_is_noticed(tmp_path):
    run = Run(tmp_path)
    run.train(2)
    run.save(tmp_path / "run.pt")
    with pytest.raises(ResumeError, match="ledger=path"):
        Run().load(tmp_path / "run.pt")
    run.engine.close()
    (tmp_path / "ledger").unlink()
    with pytest.raises(ResumeError, match="holds 0 releases"):
        Run(tmp_path).load(tmp_path / "run.pt")


def test_ledger_begun_later_takes_over_what_was_released(tmp_path):
    run = Run()
    run.train(3)
    run.save(tmp_path / "run.pt")
    resumed = Run(tmp_path)
    resumed.load(tmp_path / "run.pt")
    resumed.train(1)
    resumed.engine.close()
    assert Run(tmp_path).engine.accountant.history == [(1.0, 0.2, 4)]


def test_scheduled_run_resumes_with_value_and_position(tmp_path):
    def scheduled(run):
        noise = schedulers.ExponentialNoise(run.optimizer, gamma=0.9)
        return noise, schedulers.StepGradClip(run.optimizer, step_size=1, gamma=0.5)

    def go_on(schedules, save=None):
        def after(done):
            for schedule in schedules:
                schedule.step()
            if done == 2 and save is not None:
                save(tmp_path / "run.pt", noise_scheduler=schedules[0], grad_clip_scheduler=schedules[1])

        return after

    run, resumed = Run(), Run()
    run.train(4, after=go_on(scheduled(run), run.save))
    schedules = scheduled(resumed)
    resumed.load(tmp_path / "run.pt", noise_scheduler=schedules[0], grad_clip_scheduler=schedules[1])
    resumed.train(2, after=go_on(schedules))
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert resumed.optimizer.max_grad_norm == run.optimizer.max_grad_norm == 0.5**4
    assert resumed.engine.accountant.history == run.engine.accountant.history


def test_run_resumed_between_logical_batches_of_physical_ones_is_the_same_run(tmp_path):
    def train(run, logical, *, save_after=None):
        manager = BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer)
        last = run.optimizer.releases + logical
        with manager as loader:
            for inputs, targets in loader:
                nn.functional.cross_entropy(run.model(inputs), targets).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                if not run.optimizer.last_step_was_virtual and run.optimizer.releases == save_after:
                    run.save(tmp_path / "run.pt")
                if run.optimizer.releases == last:
                    return

    run, resumed = Run(), Run()
    train(run, 4, save_after=2)
    resumed.load(tmp_path / "run.pt")
    train(resumed, 2)
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
    assert resumed.engine.accountant.history == run.engine.accountant.history


def test_what_the_user_saves_beside_it_comes_back_and_the_models_keys_are_its_own(tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path / "run.pt", checkpoint_dict={"epoch": 7})
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    Run().model._module.load_state_dict(loaded["module_state_dict"])
    returned = Run().load(tmp_path / "run.pt")
    assert returned["epoch"] == 7
    assert "optimizer_state_dict" not in returned
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_no_checkpoint_inside_a_logical_batch(tmp_path):
    run = Run()
    nn.functional.cross_entropy(run.model(DATA.tensors[0]), DATA.tensors[1]).backward()
    with pytest.raises(MissingGradientError, match="not released"):
        run.save(tmp_path / "run.pt")
    assert list(tmp_path.iterdir()) == []


def _trained(names, steps, kills, *, at_points):
    from benchmarks import faults

    if len(names) > 1:
        faults._warm_up()
    chance = random.Random(7)
    return [asdict(faults.kill_one_training(name, steps, kills, chance, at_points=at_points)) for name in names]


def _killed(*arguments, **options):
    """Return what became of trainings that a process of its own has begun, killed and begun again."""
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        trainings = pool.submit(_trained, *arguments, **options).result()
    assert all(training["equal"] for training in trainings)
    assert not any(training["ledger_below_released"] for training in trainings)
    return trainings


def test_killed_at_every_point_of_a_step():
    (training,) = _killed(["flat"], 18, 7, at_points=True)
    assert training["kills"] == 7
    assert training["kills_between_ledger_and_update"] > 0
    assert training["lost_steps"] > 0


@pytest.mark.slow
def test_killed_at_fifty_random_times():
    trainings = _killed(["flat", "adaptive", "per_layer, ghost", "flat, graphs take over"], 150, 13, at_points=False)
    assert sum(training["kills"] for training in trainings) >= 50
