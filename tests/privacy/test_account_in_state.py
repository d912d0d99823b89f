"""Who saves and loads the optimizer's state saves and loads the account, the noise's and the sampler's position."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from ghostclip.errors import ResumeError
from ghostclip.optim.wrapped import ACCOUNT_KEY
from ghostclip.privacy.checkpoints import ACCOUNTANT
from ghostclip.privacy.optimizer_state import without_keys
from tests.engine.training import parameters_of, small_data, small_model
from tests.private_run import PrivateRun

DATA = small_data(48)
SHUFFLED = pytest.mark.filterwarnings("ignore:poisson_sampling=False", "ignore:this engine has accounted")


class Run(PrivateRun):
    """A training that knows nothing of checkpoints but the states of model and optimizer."""

    def __init__(self, **options):
        torch.manual_seed(3)
        super().__init__(DATA, **{"inner": torch.optim.AdamW, "lr": 0.05, "batch_size": 8, **options})

    def epochs(self, number):
        for _ in range(number):
            for batch in self.loader:
                self.step(batch)
        return self

    def saved(self, tmp_path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, tmp_path / "state.pt")
        return tmp_path / "state.pt"

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self


@SHUFFLED
@pytest.mark.parametrize("options", [{}, {"clipping": "adaptive"}, {"epsilon": 3.0}, {"ledger": True}], ids=str)
def test_a_resumed_training_is_the_uninterrupted_one(options, tmp_path):
    made = dict(options)
    if made.get("ledger"):
        made["ledger"] = tmp_path / "ledger"
    first = Run(**made).epochs(2)
    path = first.saved(tmp_path)
    if made.get("ledger"):
        shutil.copy(tmp_path / "ledger", tmp_path / "kept")
        made["ledger"] = tmp_path / "kept"
    resumed = Run(**made).load(path)
    assert resumed.epsilon == first.epsilon
    first.epochs(2)
    resumed.epochs(2)
    assert resumed.epsilon == first.epsilon
    assert torch.equal(parameters_of(resumed.model), parameters_of(first.model))


@pytest.mark.parametrize("prefetched", [0, 3])
def test_what_was_handed_out_and_not_released_is_drawn_again(prefetched, tmp_path):
    """Also where a wrapper had fetched further batches before the state was saved."""
    first, whole = Run(), Run()
    whole.optimizer.load_state_dict(first.optimizer.state_dict())
    batches = iter(first.loader)
    waiting = [next(batches) for _ in range(prefetched)]
    for _ in range(2):
        waiting.append(next(batches))
        first.step(waiting.pop(0))
    resumed = Run().load(first.saved(tmp_path)).epochs(1)
    whole.epochs(1)
    assert len(resumed.engine.accountant) == len(whole.engine.accountant) == len(first.loader)
    assert torch.equal(parameters_of(resumed.model), parameters_of(whole.model))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_without_an_account_is_refused(steps):
    run = Run()
    run.train(steps)
    plain = torch.optim.AdamW(small_model().parameters(), lr=0.1)
    before = run.optimizer.state_dict()
    with pytest.raises(ResumeError, match=r"original_optimizer\.load_state_dict"):
        run.optimizer.load_state_dict(plain.state_dict())
    assert run.optimizer.state_dict()["param_groups"] == before["param_groups"]
    run.optimizer.original_optimizer.load_state_dict(plain.state_dict())
    assert run.optimizer.param_groups[0]["lr"] == 0.1
    assert len(run.engine.accountant) == steps


@pytest.mark.parametrize("other", [{"sigma": 2.0}, {"batch_size": 12}, {"max_grad_norm": 3.0}], ids=str)
def test_a_state_of_another_mechanism_is_refused_and_changes_nothing(other, tmp_path):
    path = Run().epochs(1).saved(tmp_path)
    run = Run(**other)
    before = run.optimizer.state_dict()
    with pytest.raises(ResumeError, match="another mechanism"):
        run.optimizer.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    after = run.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    assert run.epsilon == 0


def test_a_state_of_another_training_is_refused_after_a_release(tmp_path):
    path = Run().epochs(2).saved(tmp_path)
    run = Run().epochs(1)
    with pytest.raises(ResumeError, match="another training"):
        run.load(path)


def _without_releases(text):
    return json.dumps({name: value for name, value in json.loads(text).items() if name != "ghostclip_releases"})


def _cheaper(text):
    state = json.loads(text)
    return json.dumps({**state, ACCOUNTANT: {**state[ACCOUNTANT], "history": [[9.0, 0.1, 1]]}})


@pytest.mark.parametrize(
    "change",
    [lambda text: text[:-9], lambda text: "[]", lambda text: "{}", lambda text: 7, _without_releases, _cheaper],
)
def test_a_damaged_account_is_refused(change):
    state = Run().epochs(1).optimizer.state_dict()
    state["param_groups"][0][ACCOUNT_KEY] = change(state["param_groups"][0][ACCOUNT_KEY])
    run = Run()
    with pytest.raises(ResumeError, match="account"):
        run.optimizer.load_state_dict(state)
    assert run.epsilon == 0


def test_loading_ones_own_state_changes_nothing():
    """As accelerate does when it prepares an optimizer."""
    run, twin = Run(), Run()
    twin.optimizer.load_state_dict(run.optimizer.state_dict())
    for _ in range(2):
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.epochs(1)
        twin.epochs(1)
    assert run.epsilon == twin.epsilon
    assert torch.equal(parameters_of(run.model), parameters_of(twin.model))


def test_a_state_without_keys_restores_epsilon_and_starts_new_keys():
    run = Run().epochs(2)
    state = run.optimizer.state_dict()
    public = without_keys(state)
    text = public["param_groups"][0][ACCOUNT_KEY]
    secrets = json.loads(state["param_groups"][0][ACCOUNT_KEY])
    for place in ("ghostclip_noise", "ghostclip_sampler"):
        assert secrets[place]["key"] not in text
    resumed = Run()
    own = json.loads(resumed.optimizer.state_dict()["param_groups"][0][ACCOUNT_KEY])
    resumed.optimizer.load_state_dict(public)
    after = json.loads(resumed.optimizer.state_dict()["param_groups"][0][ACCOUNT_KEY])
    assert resumed.epsilon == run.epsilon
    for place in ("ghostclip_noise", "ghostclip_sampler"):
        assert after[place]["key"] == own[place]["key"] != secrets[place]["key"]
    resumed.epochs(1)
    assert len(resumed.engine.accountant) == 3 * len(run.loader)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*to_local.*")
# Torch 2.8 says so of itself.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_torch_distributed_checkpoint_carries_the_account(tmp_path):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    run = Run().epochs(2)
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "dcp")
    resumed = Run()
    model_state, optimizer_state = get_state_dict(resumed.model, resumed.optimizer)
    into = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(into, checkpoint_id=tmp_path / "dcp")
    set_state_dict(resumed.model, resumed.optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert resumed.epsilon == run.epsilon > 0
    run.epochs(1)
    resumed.epochs(1)
    assert torch.equal(parameters_of(resumed.model), parameters_of(run.model))
