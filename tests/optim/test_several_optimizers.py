"""Several optimizers over one model: one release, one entry in the account, each updates its own parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip.errors import InvalidOptionError, UncoveredParameterError
from tests.engine.training import clipped_sum, declared, parameters_of, small_data, small_model

DATA = small_data(48)
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
MUON = getattr(torch.optim, "Muon", torch.optim.SGD)


class Run:
    """Muon (or SGD) on the matrices, AdamW (or SGD) on the rest."""

    def __init__(self, *, sigma=1.0, plain=False, data=None, model=None, **options):
        self.bare = small_model() if model is None else model
        matrices = [p for p in self.bare.parameters() if p.dim() == 2]
        vectors = [p for p in self.bare.parameters() if p.dim() == 1]
        first, second = (torch.optim.SGD, torch.optim.SGD) if plain else (MUON, torch.optim.AdamW)
        self.inner = [first(matrices, lr=1.0), second(vectors, lr=1.0)]
        self.engine = ghostclip.PrivacyEngine()
        made = self.engine.make_private(
            module=self.bare,
            optimizer=self.inner,
            data_loader=DataLoader(DATA, batch_size=8) if data is None else data,
            noise_multiplier=sigma,
            max_grad_norm=0.5,
            **options,
        )
        self.model, self.optimizers, self.loader = made[0], made[1], made[-1]

    def backward(self, batch):
        inputs, targets = batch
        output = self.model(inputs.to(next(self.bare.parameters()).dtype))
        losses = nn.functional.cross_entropy(output, targets, reduction="none")
        self.optimizers[0].clipper.backward(losses)

    def step(self, batch, *, order=(0, 1)):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(batch)
        for number in order:
            self.optimizers[number].step()


def test_as_many_come_back_and_each_is_an_optimizer():
    run = Run()
    assert len(run.optimizers) == 2
    for optimizer, inner in zip(run.optimizers, run.inner, strict=True):
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.original_optimizer is inner
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.expected_batch_size == 8
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)


@pytest.mark.parametrize(("strategy", "order"), [("bookkeeping", (0, 1)), ("hooks", (1, 0))])
def test_one_release_updates_all(strategy, order):
    run = Run(grad_sample_mode=strategy)
    for batch in run.loader:
        before = parameters_of(run.bare)
        run.step(batch, order=order)
        assert bool((parameters_of(run.bare) != before).all())
    assert len(run.engine.accountant) == len(run.loader) == run.optimizers[0].releases


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sum_is_clipped_over_all_parameters_and_no_sample_moves_it_by_more_than_c(strategy):
    model = small_model().double()
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def moved(rows):
        model.load_state_dict(weights)
        run = Run(sigma=0.0, plain=True, model=model, data=declared(DATA, 8), grad_sample_mode=strategy)
        before = parameters_of(model)
        run.step([part[rows] for part in DATA.tensors])
        run.model.remove_hooks()
        return (before - parameters_of(model)) * 8

    rows = list(range(8))
    whole = moved(rows)
    model.load_state_dict(weights)
    want = clipped_sum(model, [part[rows] for part in DATA.tensors], 0.5)
    torch.testing.assert_close(whole, want, rtol=1e-10, atol=1e-12)
    for left_out in rows:
        rest = moved([row for row in rows if row != left_out])
        assert (whole - rest).norm() <= 0.5 * (1 + 1e-6)


def test_checkpoints_of_the_engine(tmp_path):
    run = Run()
    for batch in run.loader:
        run.step(batch)
    run.engine.save_checkpoint(path=tmp_path / "saved", module=run.model, optimizer=run.optimizers)
    resumed = Run(model=small_model())
    resumed.engine.load_checkpoint(path=tmp_path / "saved", module=resumed.model, optimizer=resumed.optimizers)
    for one in (run, resumed):
        for batch in one.loader:
            one.step(batch)
    assert torch.equal(parameters_of(resumed.bare), parameters_of(run.bare))


def test_groups_that_join_later():
    model = small_model()
    run = Run(model=model)
    extra = model[2].weight
    with pytest.raises(InvalidOptionError, match="holds one of these"):
        run.optimizers[1].add_param_group({"params": [extra]})
    with pytest.raises(UncoveredParameterError):
        run.optimizers[1].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InvalidOptionError, match="on one of the optimizers"):
        run.optimizers[0].release.register_step_pre_hook(print)
    called = []
    run.optimizers[1].register_step_pre_hook(lambda *_: called.append(1))
    run.step(next(iter(run.loader)))
    assert called == [1]


WRONG = {
    "none": (lambda m: [], "give at least one"),
    "twice": (lambda m: [torch.optim.SGD(m.parameters(), lr=1.0), MUON([m[0].weight], lr=1.0)], "the same parameter"),
    "no optimizer": (lambda m: [torch.optim.SGD(m.parameters(), lr=1.0), None], "expected a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_optimizers_that_cannot_share_a_release_are_refused(name):
    make, text = WRONG[name]
    model = small_model()
    with pytest.raises(InvalidOptionError, match=text):
        ghostclip.PrivacyEngine().make_private(
            module=model, optimizer=make(model), data_loader=DataLoader(DATA, batch_size=8), noise_multiplier=1.0,
            max_grad_norm=0.5,
        )  # fmt: skip


def test_the_release_of_all_may_be_stepped_itself():
    run = Run()
    release = run.optimizers[0].release
    before = parameters_of(run.bare)
    run.backward(next(iter(run.loader)))
    release.step()
    assert bool((parameters_of(run.bare) != before).all())
    release.zero_grad(set_to_none=False)
    assert not any(bool(p.grad.any()) for p in run.bare.parameters())
    with pytest.raises(InvalidOptionError, match="state of 1 optimizers"):
        release.original_optimizer.load_state_dict({"members": [run.inner[0].state_dict()]})
