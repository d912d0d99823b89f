"""Between backward and step no optimizer, logger, scaler or average finds a clipped sum, and zero_grad discards it."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip.errors import MissingGradientError, TamperedGradientError, UncoveredParameterError
from tests.engine.training import batch_of, clipped_sum, declared, parameters_of, small_data, small_model

DATA = small_data(40)
BATCH = batch_of(DATA, start=0, stop=8)
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
NO_NOISE = pytest.mark.filterwarnings("ignore:noise_multiplier=0")
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Run:
    """A training without noise, so that what the inner optimizer is handed shows what was released."""

    def __init__(self, strategy="bookkeeping", *, dtype=torch.float64, wrap=True, inner=torch.optim.SGD, **options):
        self.bare = small_model().to(dtype)
        self.inner = inner(self.bare.parameters(), lr=0.1)
        self.engine = ghostclip.PrivacyEngine()
        made = self.engine.make_private(
            module=self.bare,
            optimizer=self.inner,
            data_loader=declared(DATA, 8),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            grad_sample_mode=strategy,
            criterion=nn.CrossEntropyLoss(),
            wrap_model=wrap,
            **options,
        )
        self.handle, self.optimizer = made[0], made[1]
        self.model = self.handle if wrap else self.bare
        self.applied = []
        self.optimizer.register_step_pre_hook(
            lambda *_: self.applied.append(torch.cat([p.grad.flatten() for p in self.optimizer.params]) * 8)
        )

    def backward(self, batch=BATCH):
        inputs, targets = batch
        output = self.model(inputs.to(next(self.bare.parameters()).dtype))
        self.optimizer.clipper.backward(nn.functional.cross_entropy(output, targets, reduction="none"))

    @property
    def gradients(self):
        return [p.grad for p in self.bare.parameters()]


@NO_NOISE
@every_strategy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_gradient_before_the_release(strategy, dtype):
    run = Run(strategy, dtype=dtype)
    for _ in range(3):
        run.optimizer.zero_grad()
        run.backward()
        assert run.gradients == [None] * 4
        run.optimizer.step()
        assert all(gradient.dtype == dtype for gradient in run.gradients)
        assert all(gradient.any() for gradient in run.gradients)


def _zero(run, who, *, to_none):
    {"optimizer": run.optimizer, "model": run.model, "inner model": run.bare}[who].zero_grad(set_to_none=to_none)


@NO_NOISE
@every_strategy
@pytest.mark.parametrize(
    ("who", "wrap", "to_none"),
    [("optimizer", True, True), ("optimizer", False, False), ("model", True, False), ("inner model", True, True)],
)
def test_zero_grad_discards_what_was_accumulated(who, wrap, to_none, strategy):
    run = Run(strategy, wrap=wrap)
    run.backward()
    run.optimizer.step()
    run.backward(batch_of(DATA, start=20, stop=30))
    _zero(run, who, to_none=to_none)
    assert all(p.grad is None if to_none else not p.grad.any() for p in run.bare.parameters())
    with pytest.raises(MissingGradientError):
        run.optimizer.step()
    run.backward(batch_of(DATA, start=20, stop=30))
    _zero(run, who, to_none=to_none)
    want = clipped_sum(run.bare, BATCH, 0.5)
    run.backward()
    run.optimizer.step()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)


@NO_NOISE
@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_zero_grad_keeps_earlier_parts_of_a_logical_batch_and_none_of_a_broken_one(who):
    run = Run()
    want = clipped_sum(run.bare, batch_of(DATA, start=0, stop=16), 0.5)
    run.optimizer.signal_skip_step()
    run.backward()
    run.optimizer.step()
    _zero(run, who, to_none=True)
    run.backward(batch_of(DATA, start=8, stop=16))
    run.optimizer.step()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)
    run.optimizer.signal_skip_step()
    run.backward()
    run.optimizer.step()
    run.backward()
    _zero(run, who, to_none=True)
    run.backward()
    with pytest.raises(MissingGradientError, match="earlier part"):
        run.optimizer.step()


@NO_NOISE
@every_strategy
def test_gradient_put_in_by_hand_is_refused(strategy):
    run = Run(strategy)
    run.backward()
    run.bare[2].bias.grad = torch.ones_like(run.bare[2].bias)
    with pytest.raises(TamperedGradientError, match=r"2\.bias.*weight_decay"):
        run.optimizer.step()
    assert not run.applied


@NO_NOISE
def test_the_inner_optimizer_stepped_by_mistake_is_refused():
    run = Run(inner=torch.optim.AdamW)
    run.backward()
    before = parameters_of(run.bare)
    with pytest.raises(UncoveredParameterError, match=r"step\(\) on the optimizer that make_private\(\) returned"):
        run.inner.step()
    assert torch.equal(parameters_of(run.bare), before)


@NO_NOISE
@pytest.mark.parametrize("first", [True, False])
def test_another_optimizer_over_the_model_is_refused(first):
    model = small_model()
    private_one = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    other = torch.optim.AdamW([model[0].bias, model[2].bias])
    with pytest.warns(UserWarning, match="not in the optimizer"):
        wrapped, optimizer, _ = ghostclip.PrivacyEngine().make_private(
            module=model, optimizer=private_one, data_loader=declared(DATA, 8), noise_multiplier=1.0, max_grad_norm=1.0
        )
    nn.functional.cross_entropy(wrapped(BATCH[0]), BATCH[1]).backward()
    if first:
        optimizer.step()
    before = parameters_of(model)
    with pytest.raises(UncoveredParameterError, match=r"make_private\(optimizer=\[first, second\]"):
        other.step()
    assert torch.equal(parameters_of(model), before)


@NO_NOISE
def test_other_models_optimizers_are_left_alone():
    run, other = Run(), nn.Linear(2, 2)
    run.backward()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run.optimizer.step()
    # A release may be applied again, and a model that is private no more is anybody's.
    run.inner.step()
    run.handle.remove_hooks()
    run.bare(BATCH[0].double()).sum().backward()
    torch.optim.SGD(run.bare.parameters(), lr=0.1).step()


@NO_NOISE
def test_copies_and_pickles_of_the_model_have_a_zero_grad_of_their_own():
    run = Run(wrap=False)
    run.backward()
    for twin in (copy.deepcopy(run.bare), pickle.loads(pickle.dumps(run.bare)), copy.deepcopy(copy.deepcopy(run.bare))):
        twin(BATCH[0].double()).sum().backward()
        twin.zero_grad()
        assert all(p.grad is None for p in twin.parameters())
    assert run.optimizer.clipper.has_clipped_sum
    run.handle.cleanup()
    assert "zero_grad" not in vars(run.bare)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False", "ignore:2 backward passes", "ignore:noise_multiplier=0")
def test_accumulated_shuffled_batches_release_their_mean():
    model = small_model().double()
    data = torch.utils.data.TensorDataset(DATA.tensors[0].double(), DATA.tensors[1])
    wants = [clipped_sum(model, [part[start : start + 8] for part in data.tensors], 0.5) for start in (0, 8)]
    wrapped, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
    )
    before = parameters_of(model)
    for number, (inputs, targets) in enumerate(loader):
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        if number == 1:
            optimizer.step()
            break
    torch.testing.assert_close(before - parameters_of(model), sum(wants) / 16)


@NO_NOISE
def test_an_optimizer_in_the_place_of_the_private_one_is_refused():
    """As where a trainer makes its own: the private one is thrown away, and nothing would ever be trained."""
    run = Run()
    bare, handle = run.bare, run.handle
    del run
    gc.collect()
    other = torch.optim.AdamW(bare.parameters(), lr=0.1)
    nn.functional.cross_entropy(handle(BATCH[0].double()), BATCH[1]).backward()
    before = parameters_of(bare)
    with pytest.raises(UncoveredParameterError, match=r"private optimizer is gone.*remove_hooks"):
        other.step()
    assert torch.equal(parameters_of(bare), before)
    handle.remove_hooks()
    bare(BATCH[0].double()).sum().backward()
    other.step()
    assert not torch.equal(parameters_of(bare), before)


def _made_private(module, optimizer):
    return ghostclip.PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=declared(DATA, 8), noise_multiplier=1.0, max_grad_norm=1.0
    )


@pytest.mark.filterwarnings("ignore:.*not in the optimizer")
def test_two_optimizers_made_private_one_by_one_are_refused():
    model = small_model()
    matrices, rest = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    private, first, _ = _made_private(model, torch.optim.SGD(matrices, lr=0.1))
    with pytest.raises(ghostclip.errors.InvalidOptionError, match=r"optimizer=\[first, second\]"):
        _made_private(private, torch.optim.SGD(rest, lr=0.1))
    # With all of its parameters, or after the first is given up, the model may be made private anew.
    again, _, _ = _made_private(private, torch.optim.SGD(model.parameters(), lr=0.1))
    again.remove_hooks()
    _made_private(again, torch.optim.SGD(rest, lr=0.1))
    assert first.original_optimizer.param_groups[0]["params"] == matrices
