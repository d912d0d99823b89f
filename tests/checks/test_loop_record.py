"""Loops of one's own are run again with other samples: what mixes, ranks or weighs samples by others is refused."""

from __future__ import annotations

import gc
import itertools
import math
import operator
import random
import subprocess
import sys
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip import _torch
from ghostclip.checks.loop_record import Loop, LoopRecord
from ghostclip.checks.unchecked import LOOP, Unchecked
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import GhostClipError, LossReductionError, SampleMixingError
from tests.checks.test_criterion import BATCH, FOLLOW, OWN, C, losses_of
from tests.process_group import process_group

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False", "ignore:noise_multiplier")


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.std())
        return x / x.std()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.saved_tensors[0]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def _in_place(x, change):
    change(x)
    return x


_TEACHER = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))


def _taught(output):
    with torch.no_grad():
        target = _TEACHER(output.detach()).softmax(1)
    return functional.kl_div(output.log_softmax(1), target, reduction="batchmean")


_WEIGHTS = torch.linspace(-9, 9, C * C).view(C, C).sin()


def _in_16_bits(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (model(x) @ _WEIGHTS).float()


_inferred = torch.inference_mode()(lambda run: run())
_OWN = torch.Generator().manual_seed(0)


def _dropped(output):
    return output * torch.bernoulli(torch.full_like(output, 0.8), generator=_OWN)


def _above_median(values):
    return (values * (values.detach() > values.detach().median())).mean()


def _to_means(output, t):
    means = torch.zeros(2 * C, C)
    for kind in t.unique():
        means[kind] = output.detach()[t == kind].mean(0)
    return (output - means[t]).square().mean()


def _by_counts(losses, t):
    counts = torch.zeros(C, 1)
    counts.view(-1).index_add_(0, t, torch.ones(len(t)))
    return (losses * (counts[t, 0] > 2)).mean()


class _Through(torch.autograd.Function):
    """Hands a value on, and changes its gradient."""

    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def _hooked(value, change):
    value.register_hook(change)
    return value


# What loops do with a model, inputs (B, 4), classes (B,) and numbers (B,): before the model, and after it.
MIXED = {
    "mixup": lambda m, x, t, r: losses_of(m(0.7 * x + 0.3 * x[torch.randperm(len(x))]), t).mean(),
    "mixup in place": lambda m, x, t, r: losses_of(
        m(_in_place(x, lambda x: x.mul_(0.7).add_(0.3 * x.roll(1, 0)))), t
    ).mean(),
    "features of others": lambda m, x, t, r: losses_of(
        m(_in_place(x.clone(), lambda x: x[:, :2].copy_(x.roll(1, 0)[:, :2]))), t
    ).mean(),
    "centred inputs": lambda m, x, t, r: losses_of(m(x - x.mean(0)), t).mean(),
    "inputs without the first one": lambda m, x, t, r: losses_of(m(x - x[:1]), t).mean(),
    "a scale of the last ones": lambda m, x, t, r: losses_of(m(x / x.clone().split(BATCH - 1)[1].norm()), t).mean(),
    "those above the mean": lambda m, x, t, r: losses_of(m(x * (r > r.mean())[:, None]), t).mean(),
    "one scale": lambda m, x, t, r: losses_of(m(x / x.abs().max()), t).mean(),
    "a scale that was read": lambda m, x, t, r: losses_of(m(x / x.abs().max().item()), t).mean(),
    "one scale and noise for each": lambda m, x, t, r: losses_of(m(x / x.abs().max() + torch.randn_like(x)), t).mean(),
    "mixup and dropout": lambda m, x, t, r: losses_of(
        m(functional.dropout(0.7 * x + 0.3 * x[torch.randperm(len(x))], 0.2)), t
    ).mean(),
    "an attack of one scale": lambda m, x, t, r: losses_of(m(x + (g := _slope(m, x, t)) / g.abs().max()), t).mean(),
    "one scale, in inference mode": lambda m, x, t, r: losses_of(
        m(_inferred(lambda: x / x.abs().max()).clone()), t
    ).mean(),
    "one scale and noise": lambda m, x, t, r: losses_of(m(x / x.abs().max() + 0.1 * torch.randn(4)), t).mean(),
    "batch norm in front": lambda m, x, t, r: losses_of(m(nn.BatchNorm1d(4)(x).detach()), t).mean(),
    "in order, and one of them twice": lambda m, x, t, r: (
        order := r.argsort(),
        x := x[order],
        losses_of(m(x.index_copy(0, torch.tensor([0]), x[-1:])), t[order]),
    )[2].mean(),
    "centred in place, by a view": lambda m, x, t, r: (z := x[:], z.sub_(z.mean(0)), losses_of(m(x), t).mean())[2],
    "centred in place, outside of the graph": lambda m, x, t, r: (
        x.detach().sub_(x.mean(0)),
        losses_of(m(x), t).mean(),
    )[1],
    "centred in place, as data": lambda m, x, t, r: (x.data.sub_(x.mean(0)), losses_of(m(x), t).mean())[1],
    "centred, written out": lambda m, x, t, r: (torch.sub(x, x.mean(0), out=x), losses_of(m(x), t).mean())[1],
    "centred, assigned": lambda m, x, t, r: (setattr(x, "data", x - x.mean(0)), losses_of(m(x), t).mean())[1],
    "centred after an operation in place": lambda m, x, t, r: (
        functional.relu(x, inplace=True),
        losses_of(m(x - x.mean(0)), t).mean(),
    )[1],
    "a part less the mean of another, in place": lambda m, x, t, r: (
        parts := x[:].chunk(2),
        parts[0].sub_(parts[1].mean(0)),
        losses_of(m(x), t).mean(),
    )[2],
    "one half in place": lambda m, x, t, r: (x[: BATCH // 2].mul_(2), losses_of(m(x), t).mean())[1],
    "one half": lambda m, x, t, r: losses_of(m(torch.cat([x[:3], -x[3:]])), t).mean(),
}
# What the backward holds of the batch: how it changes a gradient g (B, C).
HELD = {
    "a mean of the inputs": (lambda g, x, t, r: g * x.mean(), True),
    "a mean of the classes": (lambda g, x, t, r: g * (1 + t.float().mean()), True),
    "the class of the first one": (lambda g, x, t, r: g * (t == t[0])[:, None], True),
    "a place in the batch": (lambda g, x, t, r: g * (r >= r.median())[:, None], True),
    "its own inputs": (lambda g, x, t, r: g * x[:, :1], False),
    "its own class": (lambda g, x, t, r: g * (t > 1)[:, None], False),
    "nothing": (lambda g, x, t, r: 2 * g, False),
}
WEIGHED = {
    "labels mixed before": lambda m, x, t, r: (u := t.roll(1), losses_of(m(x), t) + 0.3 * losses_of(m(x), u))[1].mean(),
    "targets standardised before": lambda m, x, t, r: (s := (r - r.mean()) / r.std(), (m(x)[:, 0] - s) ** 2)[1].mean(),
    "counts of moved labels": lambda m, x, t, r: (
        t := t.int().long(), (losses_of(m(x), t) * (1 / t.bincount(minlength=C))[t]).mean()
    )[1],
    "weights, normalised before": lambda m, x, t, r: (w := r.abs() / r.abs().max(), losses_of(m(x), t) * w)[1].mean(),
    "behind a function of one's own": lambda m, x, t, r: _above_median(_Square.apply(m(x)).sum(1)),
    "inside of a function of one's own": lambda m, x, t, r: _Scaled.apply(m(x)).square().mean(),
    "a teacher with batch statistics": lambda m, x, t, r: _taught(m(x)),
    "beside noise": lambda m, x, t, r: _above_median(losses_of(m(x) + 0.1 * torch.randn(len(x), C), t)),
    "a reference of others": lambda m, x, t, r: functional.mse_loss(out := m(x), out.roll(1, 0).detach()),
    "as the first one": lambda m, x, t, r: losses_of(m(x), t).mul(1.0 + torch.isin(t, t.narrow(0, 0, 1))).mean(),
    "a temperature for each": lambda m, x, t, r: losses_of((o := m(x)) * o.detach().std().expand(len(x), 1), t).mean(),
    "beside noise of its own": lambda m, x, t, r: _above_median(losses_of(_dropped(m(x)), t)),
    "outputs in place": lambda m, x, t, r: _above_median(losses_of(_in_place(m(x), lambda o: o.mul_(2.0)), t)),
    "after an attack": lambda m, x, t, r: _above_median(losses_of(m(x + 0.1 * _slope(m, x, t).sign()), t)),
    "a threshold that was read": lambda m, x, t, r: (
        e := losses_of(m(x), t), e * (e > float(e.detach().median()))
    )[1].mean(),
    "a list that was read": lambda m, x, t, r: (
        losses_of(m(x), t) * torch.tensor((r.abs() / r.abs().max()).tolist())
    ).mean(),
    "means of the classes that are there": lambda m, x, t, r: _to_means(m(x), t + C * (r > 0)),
    "counts in a view": lambda m, x, t, r: _by_counts(losses_of(m(x), t), t),
    "in 16 bits": lambda m, x, t, r: _above_median(losses_of(_in_16_bits(m, x), t)),
}  # fmt: skip
ALONE = {
    "constants": lambda m, x, t, r: losses_of(m((x - 0.1) / 0.3), t).mean(),
    "its own scale": lambda m, x, t, r: losses_of(m(x / x.abs().amax(1, keepdim=True)), t).mean(),
    "a generator of its own": lambda m, x, t, r: losses_of(m(_dropped(x)), t).mean(),
    "noise": lambda m, x, t, r: losses_of(m(x + 0.1 * torch.randn_like(x)), t).mean(),
    "some of them turned": lambda m, x, t, r: losses_of(m(x.where(torch.rand(len(x), 1) < 0.5, -x)), t).mean(),
    "something erased": lambda m, x, t, r: losses_of(
        m(
            _in_place(
                x.clone(), lambda x: x.index_put_((torch.arange(len(x)), torch.randint(4, (len(x),))), x.new_zeros(()))
            )
        ),
        t,
    ).mean(),
    "in place": lambda m, x, t, r: losses_of(m(_in_place(x, lambda x: x.mul_(0.7).add_(0.1))), t).mean(),
    "put in order": lambda m, x, t, r: (order := r.argsort(), losses_of(m(x[order]), t[order]))[1].mean(),
    "shuffled": lambda m, x, t, r: (order := torch.randperm(len(x)), losses_of(m(x[order]), t[order]))[1].mean(),
    "put in order, and dropout": lambda m, x, t, r: (
        order := r.argsort(),
        losses_of(m(functional.dropout(x[order], 0.2)), t[order]),
    )[1].mean(),
    "put in order, and noise": lambda m, x, t, r: (
        order := r.argsort(),
        losses_of(m(x[order] + 0.1 * torch.randn_like(x)), t[order]),
    )[1].mean(),
    "the first ones first": lambda m, x, t, r: losses_of(m(torch.cat([x[:3], x[3:]])), t).mean(),
    "a mean that nobody uses": lambda m, x, t, r: (x.mean(0), losses_of(m(x), t))[1].mean(),
    "attacked inputs": lambda m, x, t, r: losses_of(m(x + 0.1 * _slope(m, x, t).sign()), t).mean(),
    "attacked inputs, each to its own size": lambda m, x, t, r: losses_of(
        m(x + functional.normalize(_slope(m, x, t), dim=1)), t
    ).mean(),
    "a function of one's own": lambda m, x, t, r: _Square.apply(m(x)).mean(),
    "outputs in place": lambda m, x, t, r: functional.cross_entropy(_in_place(m(x), lambda o: o.mul_(2.0)), t),
    "its own number, read": lambda m, x, t, r: (losses_of(m(x), t) * torch.tensor(r.tolist())).mean(),
    "a part that is shown": lambda m, x, t, r: (o := m(x), _shown(o), losses_of(o, t))[2].mean(),
    "a table as long as the batch": lambda m, x, t, r: losses_of(m(x) + torch.linspace(0, 1, BATCH)[:C], t).mean(),
    "a running loss": lambda m, x, t, r: (loss := losses_of(m(x), t).mean(), _TOTAL.add_(loss.detach()))[0],
    "what a generator makes beside them": lambda m, x, t, r: (
        made := _GENERATOR(torch.randn(BATCH, 4)).detach()[torch.arange(len(x)) % BATCH],
        losses_of(m(made), t).mean() + losses_of(m(x), t).mean(),
    )[1],
    "turned by a view": lambda m, x, t, r: (x[:].mul_(-1), losses_of(m(x), t).mean())[1],
    "turned one by one": lambda m, x, t, r: (
        [one.mul_(-1) for one in x[:] if random.random() < 0.5],
        losses_of(m(x), t).mean(),
    )[1],
    "turned as halves": lambda m, x, t, r: losses_of(m(torch.cat([-x[:3], -x[3:]])), t).mean(),
    "a device": lambda m, x, t, r: _on_device(lambda: losses_of(m(x) + torch.zeros(C), t).mean()),
}
_TOTAL = torch.zeros(())
_GENERATOR = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def _shown(output):
    with torch.no_grad():
        return output.expand(len(output), -1, -1).exp().sum()


def _slope(model, x, t):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(losses_of(model(x), t).sum(), x)[0]


def _on_device(run):
    with torch.device("cpu"):
        return run()


class _Training:
    """A private training whose batches are BATCH records, in an order of its own."""

    def __init__(self, seed=0, *, first=nn.Identity, features=4, model=None, numbered=False, criterion=None, ids=None):
        torch.manual_seed(seed)
        x = torch.randn(3 * BATCH, 4) if ids is None else torch.randint(ids, (3 * BATCH, 9))
        columns = x, torch.arange(3 * BATCH) % C, torch.randn(3 * BATCH)
        data = TensorDataset(*columns, *([torch.arange(3 * BATCH)] if numbered else []))
        model = model or nn.Sequential(first(), nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, C))
        given = {} if criterion is None else {"criterion": criterion}
        self.model, self.optimizer, *criteria, self.loader = ghostclip.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, BATCH),
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, **given,
        )  # fmt: skip
        self.criterion = next(iter(criteria), None)

    def step(self, loop):
        """Run a loop's steps over the data."""
        for batch in self.loader:
            self.optimizer.zero_grad()
            loss = loop(self.model, *batch)
            (loss.mean() if loss.dim() else loss).backward()
            self.optimizer.step()


@pytest.mark.parametrize("name", MIXED)
def test_inputs_in_which_samples_meet_are_refused(name):
    training = _Training()
    with pytest.raises(SampleMixingError, match=r"one sample's rows changed when others were replaced.*in eval mode"):
        training.step(MIXED[name])
    assert training.optimizer.releases == 0


# Two samples of which one follows the other are told apart with a probability of 3/4 in each step that is looked at.
class _Column(nn.Module):
    def forward(self, numbers):
        return numbers[:, None].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_inputs_of_one_number_each_are_too(dtype):
    training = _Training(first=_Column, features=1)
    with pytest.raises(SampleMixingError, match="one sample's rows changed when others were replaced"):
        training.step(lambda m, x, t, r: losses_of(m((9 * (r - r.abs().max())).to(dtype)), t).mean())
    _Training(first=_Column, features=1).step(lambda m, x, t, r: losses_of(m((9 * r).to(dtype)), t).mean())


class _Pairs(nn.Module):
    """A model of inputs and numbers beside them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x, r):
        return functional.softplus(self.layer(torch.cat([x, r[:, None]], 1))[:, 0])


@pytest.mark.parametrize("order", ["other", "same"])
def test_inputs_of_one_forward_are_in_one_order(order):
    training = _Training(model=_Pairs())

    def loop(model, x, t, r):
        places = torch.randperm(len(x))
        return model(x[places] if order == "same" else x, r[places]).mean()

    with pytest.raises(SampleMixingError, match="another order") if order == "other" else nullcontext():
        training.step(loop)
    assert training.optimizer.releases == (0 if order == "other" else 3)


@pytest.mark.parametrize("name", [*WEIGHED, *sorted(FOLLOW.keys() - {"one number for one"})])
def test_losses_in_which_samples_meet_are_refused(name):
    training = _Training()
    known = FOLLOW.get(name)
    loop = WEIGHED.get(name) or (lambda m, x, t, r: known(m(x), t, r).mean())
    with pytest.raises((LossReductionError, SampleMixingError)):
        training.step(loop)
    assert training.optimizer.releases == 0


@pytest.mark.parametrize("place", ["hook on outputs", "function behind outputs", "hook on a layer", "function inside"])
@pytest.mark.parametrize("name", HELD)
def test_what_a_backward_holds_of_the_batch_is_looked_at(name, place):
    change, mixes = HELD[name]
    held, results, model = [], [], nn.Sequential(nn.Linear(4, C), nn.Identity(), nn.Linear(C, C))

    def through(grad):
        return change(grad, *held)

    if "hook on a layer" in place:
        model[0].register_forward_hook(lambda module, args, output: _hooked(output, through))
    if "inside" in place:
        model[1].register_forward_hook(lambda module, args, output: _Through.apply(output, through))

    def loop(m, x, t, r):
        held[:] = x, t, r
        output = m(x)
        if place == "hook on outputs":
            _hooked(output, through)
        loss = losses_of(_Through.apply(output, through) if "behind" in place else output, t).mean()
        results.extend(map(weakref.ref, (output, loss)))
        return loss

    training = _Training(model=model)
    refused = pytest.raises(LossReductionError, match="holds of the batch")
    gc.disable()
    try:
        with refused if mixes else nullcontext():
            training.step(loop)
        assert mixes or not any(result() is not None for result in results)
    finally:
        gc.enable()
    assert training.optimizer.releases == (0 if mixes else 3)
    # What was exchanged for it is back.
    assert [*map(len, held)] == 3 * [BATCH]
    assert len(held[0].unique()) == held[0].numel()


FAR = {
    "labels above a mean": ([7, 11], lambda m, x, t, r: losses_of(m(x), t.where(r > r.mean(), 0 * t)).mean()),
    "rare labels of the surest half": ([2, 8, 18, 28], lambda m, x, t, r: (
        sure := m(x).detach().amax(1), losses_of(m(x), (t * (r > 1)).where(sure > sure.median(), 0 * t)),
    )[1].mean()),
}  # fmt: skip


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, (seeds, _) in FAR.items() for seed in seeds])
def test_thresholds_are_met_by_samples_that_move_them_far(name, seed):
    training = _Training(seed)
    with pytest.raises(LossReductionError, match="half of the samples were replaced"):
        training.step(FAR[name][1])
    assert training.optimizer.releases == 0


@pytest.mark.parametrize("seed", range(6))
def test_thresholds_of_whole_numbers_are_met_by_the_largest_and_the_smallest(seed):
    training = _Training(seed, ids=11, model=nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(36, C)))
    with pytest.raises(SampleMixingError, match="one sample's rows changed when others were replaced"):
        training.step(lambda m, x, t, r: losses_of(m(x.where(x > x.double().mean(), 0)), t).mean())
    assert training.optimizer.releases == 0


@pytest.mark.parametrize("seed", range(6))
def test_samples_that_seem_to_have_moved_are_held_against_batches_of_one(seed):
    training = _Training(seed)
    with pytest.raises(SampleMixingError, match="one sample's rows changed when others were replaced"):
        training.step(lambda m, x, t, r: losses_of(m(x * (t > t.float().mean())[:, None]), t).mean())
    assert training.optimizer.releases == 0


class _Ahead:
    """Fetches batches ahead and moves them, as loaders for another device do."""

    def __init__(self, loader, change):
        self.loader, self.change = loader, change

    def __iter__(self):
        batches = ([self.change(part) for part in batch] for batch in self.loader)
        return map(operator.itemgetter(0), itertools.pairwise(itertools.chain(batches, [None])))


AHEAD = {
    "before": (lambda part: part / part.abs().max() if part.dim() == 2 else part.clone(), ALONE["constants"]),
    "after": (torch.clone, MIXED["mixup"]),
    "weights": (torch.clone, WEIGHED["weights, normalised before"]),
}


@pytest.mark.parametrize("name", AHEAD)
def test_batches_that_are_fetched_ahead_hide_nothing(name):
    change, loop = AHEAD[name]
    training = _Training()
    training.loader = _Ahead(training.loader, change)
    with pytest.raises((LossReductionError, SampleMixingError)):
        training.step(loop)
    assert training.optimizer.releases == 0
    training = _Training()
    training.loader = _Ahead(training.loader, torch.clone)
    training.step(ALONE["its own scale"])
    assert training.optimizer.releases == 3


@pytest.mark.parametrize("name", [*ALONE, *OWN])
def test_samples_by_themselves_are_not(name):
    own = OWN.get(name)
    for seed in range(3):
        training = _Training(seed)
        training.step(ALONE.get(name) or (lambda m, x, t, r: own(m(x), t, r).mean()))
        assert training.optimizer.releases == 3
        assert not _torch.active_modes()


@pytest.mark.parametrize("name", ["mixup", "centred inputs", "one scale", *ALONE])
def test_batches_that_came_through_numpy_are_looked_at_where_nothing_else_is(name):
    training, loop = _Training(), MIXED.get(name) or ALONE[name]
    with pytest.raises(SampleMixingError, match="one sample's rows") if name in MIXED else nullcontext():
        training.step(lambda m, x, t, r: loop(m, *(torch.from_numpy(one.numpy().copy()) for one in (x, t, r))))
    assert training.optimizer.releases == (0 if name in MIXED else 3)


IN_PARTS = {
    "sliced": lambda x: (x[: BATCH // 2], x[BATCH // 2 :]),
    "in chunks": lambda x: x.chunk(2),
    "copied, and split": lambda x: x.clone().split(BATCH // 2),
}


@pytest.mark.filterwarnings("ignore:.*backward passes")
@pytest.mark.parametrize("name", IN_PARTS)
def test_a_batch_that_a_loop_goes_through_in_parts_is_looked_at_in_parts(name):
    def step(training, loop):
        for x, t, _ in training.loader:
            training.optimizer.zero_grad()
            for part in zip(*map(IN_PARTS[name], (x, t)), strict=True):
                (loop(training.model, *part).mean() / 2).backward()
            training.optimizer.step()

    step(_Training(), lambda m, x, t: losses_of(m(x), t))
    with pytest.raises(SampleMixingError, match="one sample's rows changed"):
        step(_Training(), lambda m, x, t: losses_of(m(0.7 * x + 0.3 * x.flip(0)), t))
    with pytest.raises(LossReductionError, match="half of the samples were replaced"):
        step(_Training(), lambda m, x, t: losses_of(m(x), t) * (1 / t.bincount(minlength=C))[t])


def _in_two_rows(records):
    first, second, margins = (torch.stack(column) for column in zip(*records, strict=True))
    return torch.cat([first, second]), margins


@pytest.mark.parametrize("has_margins", [False, True])
def test_parts_with_two_rows_of_each_record_are_not_taken_for_the_draw(has_margins):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(3 * BATCH, 4), torch.randn(3 * BATCH, 4), torch.randn(3 * BATCH))
    model = nn.Linear(4, 1)
    model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(data, BATCH, collate_fn=_in_two_rows), poisson_sampling=False,
    )  # fmt: skip
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=BATCH // 2, optimizer=optimizer)
    with manager as parts:
        for rows, margins in parts:
            assert len(rows) == BATCH
            scores = torch.cat([model(half)[:, 0] for half in rows.chunk(2)]) * rows[:, 0]
            better, worse = scores.chunk(2)
            apart = better - worse - (margins if has_margins else 1.0)
            (-functional.logsigmoid(apart)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.releases == 3


# What a loop makes of inputs (B, 4) and classes (B,) before it goes through them in parts: those, and weights.
BEFORE_PARTS = {
    "centred": lambda x, t: (x - x.mean(0), t, x[:, 0]),
    "centred in place": lambda x, t: (_in_place(x, lambda x: x.sub_(x.mean(0))), t, torch.ones(len(x))),
    "mixup": lambda x, t: (0.7 * x + 0.3 * x[torch.randperm(len(x))], t, torch.ones(len(x))),
    "one scale of weights": lambda x, t: (x, t, x[:, 0] / x[:, 0].max()),
    "counts": lambda x, t: (x, t, (1 / t.bincount(minlength=C))[t]),
    "its own": lambda x, t: (x / x.norm(dim=1, keepdim=True), t.clamp(max=1), x[:, 0].abs()),
    "sorted": lambda x, t: (x[x[:, 0].argsort()], t[x[:, 0].argsort()], x[:, 0].sort().values),
    "other order, and noise": lambda x, t: ((x + 0.1 * torch.randn_like(x)).flip(0), t.flip(0), x[:, 0].flip(0)),
}
KEEP_APART = ("its own", "sorted", "other order, and noise")


@pytest.mark.filterwarnings("ignore:.*backward passes")
@pytest.mark.parametrize("name", BEFORE_PARTS)
def test_what_is_computed_over_a_batch_before_it_goes_through_in_parts_is_looked_at(name):
    training, apart = _Training(), name in KEEP_APART
    with nullcontext() if apart else pytest.raises(GhostClipError, match=r"half of the samples|one sample's rows"):
        for x, t, _ in training.loader:
            training.optimizer.zero_grad()
            for part in zip(*(one.split(BATCH // 2) for one in BEFORE_PARTS[name](x, t)), strict=True):
                ((losses_of(training.model(part[0]), part[1]) * part[2]).mean() / 2).backward()
            training.optimizer.step()
    assert training.optimizer.releases == (3 if apart else 0)


class _Keeps:
    """A loop that keeps something of a batch for the steps after it; ``after``: what it does after a step."""

    def __init__(self, size=()):
        self.kept, self.after = torch.linspace(0.3, 0.7, math.prod(size)).view(size), lambda: None

    def mean(self, values):
        """Move what is kept towards a mean, and return what it was."""
        before = self.kept
        self.kept = 0.5 * before + 0.5 * values.detach().mean(0)
        return before

    def later(self, do):
        self.after = do


def _with_queue(loop, output, after):
    rows = output.detach() + 0.1 * torch.randn_like(output)
    logits = torch.cat([(output * rows).sum(1, keepdim=True), output @ loop.kept.clone().T], 1)

    def enqueue():
        loop.kept[(BATCH * 5 + torch.arange(len(rows))) % len(loop.kept)] = rows

    loop.later(enqueue) if after else enqueue()
    return functional.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))


class _Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, output):
        target = (output.detach() - self.mean).softmax(1)
        self.mean.mul_(0.5).add_(0.5 * output.detach().mean(0))
        return -(target * output.log_softmax(1)).sum(1).mean()


_CENTRE = _Centre()


def _to_prototypes(loop, output, t):
    losses = (output - loop.kept[t]).square().sum(1)
    for kind in t.unique():
        loop.kept[kind] = 0.5 * loop.kept[kind] + 0.5 * output.detach()[t == kind].mean(0)
    return losses.mean()


def _with_largest(loop, output, t):
    largest, loop.kept = loop.kept, output.detach().abs().max()
    return losses_of(output / largest, t).mean()


def _with_last_inputs(loop, m, x, t):
    mean, last = loop.kept[:3].mean(), x
    loop.later(lambda: setattr(loop, "kept", last))
    return losses_of(m(x - mean), t).mean()


def _to_last_outputs(loop, m, x, t, number):
    output, before = m(x), loop.kept[number].clone()
    loop.kept[number] = output.detach()
    return (losses_of(output, t) + (output - before).square().sum(1)).mean()


def _with_teacher(loop, m, x, t):
    weight = next(iter(m.parameters()))
    loop.later(lambda: setattr(loop, "kept", loop.kept.mean() + weight.detach().mean()))
    return losses_of(m(x) + loop.kept.mean(), t).mean()


# By what a loop keeps: the shape of it, and what is done with a model, inputs, classes, numbers and places of records.
KEPT = {
    "a queue": ((6 * BATCH, C), lambda k, m, x, t, r, i: _with_queue(k, m(x), after=False)),
    "a queue, filled after the step": ((6 * BATCH, C), lambda k, m, x, t, r, i: _with_queue(k, m(x), after=True)),
    "a threshold": ((), lambda k, m, x, t, r, i: (e := losses_of(m(x), t), e * (e.detach() > k.mean(e)))[1].mean()),
    "a centre": ((C,), lambda k, m, x, t, r, i: functional.mse_loss(o := m(x), (o.detach() - k.mean(o)).softmax(1))),
    "a centre in inference mode": (
        (C,),
        lambda k, m, x, t, r, i: losses_of((o := m(x)) - _inferred(lambda: k.mean(o)).clone(), t).mean(),
    ),
    "a centre in a module": ((), lambda k, m, x, t, r, i: _CENTRE(m(x))),
    "a mean of inputs": ((4,), lambda k, m, x, t, r, i: losses_of(m(x - k.mean(x)), t).mean()),
    "a mean of targets": ((), lambda k, m, x, t, r, i: (m(x)[:, 0] - r + k.mean(r)).square().mean()),
    "prototypes": ((C, C), lambda k, m, x, t, r, i: _to_prototypes(k, m(x), t)),
    "a mean, by a view": (
        (C,),
        lambda k, m, x, t, r, i: (
            o := m(x),
            k.later(lambda: k.kept.view(-1).mul_(0.5).add_(o.detach().mean(0))),
            functional.mse_loss(o, (o.detach() - k.kept).softmax(1)),
        )[2],
    ),
    "a deviation": ((), lambda k, m, x, t, r, i: losses_of(m(x) / k.mean(r.square()).sqrt(), t).mean()),
    "the largest output": ((), lambda k, m, x, t, r, i: _with_largest(k, m(x), t)),
    "the last inputs": ((1, 1), lambda k, m, x, t, r, i: _with_last_inputs(k, m, x, t)),
}
KEPT_OF_ITSELF = {
    "each record's last output": ((3 * BATCH, C), lambda k, m, x, t, r, i: _to_last_outputs(k, m, x, t, i)),
    "a mean of parameters": ((), lambda k, m, x, t, r, i: _with_teacher(k, m, x, t)),
    "a table as long as the batch": (
        (BATCH,),
        lambda k, m, x, t, r, i: (losses_of(m(x) + k.kept[:C], t), k.kept.sin())[0].mean(),
    ),
    "a mean that is shown": ((), lambda k, m, x, t, r, i: (e := losses_of(m(x), t), k.mean(e), e)[2].mean()),
}


def _steps(loop, *, epochs=4, seed=0):
    """Run a loop that keeps something; return how many releases there were."""
    size, compute = loop
    keeps, training = _Keeps(size), _Training(seed, numbered=True)
    for _ in range(epochs):
        for batch in training.loader:
            training.optimizer.zero_grad()
            compute(keeps, training.model, *batch).backward()
            training.optimizer.step()
            keeps.after()
    return training.optimizer.releases


@pytest.mark.parametrize("name", KEPT)
def test_what_a_loop_keeps_of_a_batch_may_not_move_several_samples_of_a_later_one(name):
    either = r"kept of an earlier batch|one sample's rows changed"
    for seed in range(6 if name == "a deviation" else 1):
        with pytest.raises((LossReductionError, SampleMixingError), match=either):
            _steps(KEPT[name], seed=seed)


@pytest.mark.parametrize("name", KEPT_OF_ITSELF)
def test_what_a_loop_keeps_of_each_record_for_itself_may(name):
    assert _steps(KEPT_OF_ITSELF[name]) == 12
    assert not _torch.active_modes()


def test_a_loop_over_physical_batches_that_is_left_leaves_no_mode():
    training = _Training()
    manager = BatchMemoryManager(
        data_loader=training.loader, max_physical_batch_size=BATCH // 2, optimizer=training.optimizer
    )
    with manager as loader:
        for x, t, _ in loader:
            loss = losses_of(training.model(x), t).mean()
            loss.backward()
            assert _torch.active_modes()
            break
    assert not _torch.active_modes()


def test_what_a_loop_keeps_of_large_batches_is_looked_at_whole(monkeypatch):
    monkeypatch.setattr("ghostclip.checks.loop_record._LARGE", 8)
    with pytest.raises(LossReductionError, match="kept of an earlier batch"):
        _steps(KEPT["a queue, filled after the step"])


class _InContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, C)

    def forward(self, x, context):
        return self.layer(x + context)


def test_what_a_loop_keeps_and_hands_to_the_model_is_looked_at():
    training, context = _Training(model=_InContext()), torch.zeros(4)
    one, two, _ = training.loader
    losses_of(training.model(one[0], context), one[1]).mean().backward()
    context = 0.5 * context + 0.5 * one[0].mean(0)
    with pytest.raises(SampleMixingError, match="kept of an earlier batch"):
        training.model(two[0], context)


def test_what_a_loop_keeps_is_looked_at_where_the_loss_is_known():
    training, mean = _Training(criterion=nn.MSELoss()), torch.zeros(())
    one, two, _ = training.loader
    training.criterion(training.model(one[0])[:, 0], one[2]).backward()
    mean = mean + one[2].mean()
    assert not training.optimizer.clipper._evidence.unchecked.reason(LOOP)
    loss = training.criterion(training.model(two[0])[:, 0], two[2] - mean)
    with pytest.raises(LossReductionError, match="kept of an earlier batch"):
        loss.backward()


def test_labels_that_enter_by_their_number_alone_are_the_samples_of_the_loader():
    training = _Training(criterion=lambda o, t: functional.mse_loss(o, o.detach() * t.count_nonzero()))
    with pytest.raises(LossReductionError, match="criterion"):
        training.step(lambda m, x, t, r: training.criterion(m(x), t))
    assert training.optimizer.releases == 0


def test_a_loop_that_keeps_something_is_seen_without_a_loader():
    def steps(clipper, model):
        centre = torch.zeros(C)
        for _ in range(2):
            output = model(torch.randn(BATCH, 4))
            losses = functional.mse_loss(output, output.detach() - centre, reduction="none").sum(1)
            centre = 0.5 * centre + 0.5 * output.detach().mean(0)
            clipper.backward(losses)
            clipper.reset()

    model = nn.Linear(4, C)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
    with pytest.raises(LossReductionError, match="kept of an earlier batch"):
        steps(clipper, model)
    clipper.remove()


def test_what_follows_a_backward_draws_the_numbers_that_it_draws_without():
    def numbers(*, recorded):
        training, own, drawn = _Training(), torch.Generator().manual_seed(0), []
        training.optimizer.clipper._evidence.loop.is_on = recorded
        for x, t, _ in training.loader:
            loss = losses_of(training.model(x), t).mean()
            loss.backward()
            training.optimizer.step()
            drawn.append(loss.detach() * 0 + torch.rand_like(loss.detach()) + torch.rand((), generator=own))
        return torch.stack(drawn)

    assert torch.equal(numbers(recorded=True), numbers(recorded=False))


def test_logits_of_many_classes_are_looked_at_in_a_few_samples(monkeypatch):
    monkeypatch.setattr("ghostclip.checks.loop_record._LARGE", 8)
    _Training().step(lambda m, x, t, r: losses_of(m(x), t).mean())
    with pytest.raises(LossReductionError, match="half of the samples were replaced"):
        _Training().step(lambda m, x, t, r: _above_median(losses_of(m(x), t)))


def test_a_loop_meets_the_numbers_that_it_meets_without():
    def numbers(*, recorded):
        training, drawn, own = _Training(), [], torch.Generator().manual_seed(0)
        training.optimizer.clipper._evidence.loop.is_on = recorded

        def loop(model, x, t, r):
            drawn.append(torch.rand(3))
            inputs = x + torch.randn_like(x) + torch.empty_like(x).normal_(generator=own)
            return losses_of(functional.dropout(model(inputs), 0.3), t).mean()

        training.step(loop)
        return torch.stack([*drawn, torch.rand(3), torch.rand(3, generator=own)])

    assert torch.equal(numbers(recorded=True), numbers(recorded=False))


def test_what_a_loop_writes_to_is_written_once():
    training, total, losses = _Training(), torch.zeros(()), []

    def loop(model, x, t, r):
        loss = losses_of(model(x), t).mean()
        total.add_(loss.detach())
        losses.append(loss.detach())
        return loss

    training.step(loop)
    torch.testing.assert_close(total, sum(losses))
    mean, variance, means = torch.zeros(C), torch.ones(C), []

    def taught(model, x, t, r):
        output = model(x)
        means.append(output.detach().mean(0))
        target = functional.batch_norm(output.detach(), mean, variance, training=True, momentum=1.0)
        return functional.mse_loss(output, target)

    with pytest.raises(LossReductionError):
        _Training().step(taught)
    torch.testing.assert_close(mean, *means)


def test_gradients_of_the_step_before_are_no_part_of_a_loop():
    training = _Training()
    batches = iter(training.loader)
    for loop in (ALONE["in place"], MIXED["mixup in place"]):
        batch = next(batches)
        training.optimizer.zero_grad()
        with pytest.raises(SampleMixingError) if training.optimizer.releases else nullcontext():
            loop(training.model, *batch).backward()
            training.optimizer.step()
        training.optimizer.clipper._evidence.renew()
    assert training.optimizer.releases == 1


@pytest.mark.parametrize("kinds", [2, BATCH])
def test_whether_a_loop_was_run_again_is_reported(kinds):
    training = _Training()

    def loop(model, x, t, r):
        one, *others = (torch.arange(BATCH) % kinds + 0 * t).unique()
        return losses_of(model(x) + one * sum(others), t).mean()

    training.step(loop)
    report = training.optimizer.clipper._evidence.unchecked.reason(LOOP)
    assert report == ("" if kinds == 2 else "in a step that was looked at it could not be run again")


def test_what_a_tensor_is_a_view_of_is_no_computation():
    training = _Training()

    def loop(model, x, t, r):
        assert _torch.base_of(x[:]) is x
        return losses_of(model(x - x.mean(0)), t).mean()

    with pytest.raises(SampleMixingError, match="one sample's rows changed when others were replaced"):
        training.step(loop)


def test_a_table_of_inference_mode_is_a_constant():
    table = _inferred(lambda: torch.arange(float(C)))
    _Training().step(lambda m, x, t, r: (losses_of(m(x), t) * table[t]).mean())


def test_a_loop_that_moves_samples_is_not_followed_for_ever():
    training = _Training()
    training.step(ALONE["put in order"])
    assert not training.optimizer.clipper._evidence.loop.may_keep


def test_what_ranks_exchange_after_a_backward_is_exchanged_once(tmp_path, monkeypatch):
    asked, reduce = [], torch.distributed.all_reduce

    def noted(*given):
        asked.append(given)
        return reduce(*given)

    monkeypatch.setattr(torch.distributed, "all_reduce", noted)
    with process_group(0, 1, str(tmp_path)):
        training = _Training()
        for x, t, _ in training.loader:
            loss = losses_of(training.model(x), t).mean()
            loss.backward()
            training.optimizer.step()
            torch.distributed.all_reduce(loss.detach())
    assert len([given for given in asked if given[0].dim() == 0]) == 3


@pytest.mark.parametrize("before", [True, False])
def test_what_ranks_exchange_is_exchanged_once(tmp_path, monkeypatch, before):
    asked, gather = [], torch.distributed.all_gather

    def noted(*given):
        asked.append(given)
        return gather(*given)

    monkeypatch.setattr(torch.distributed, "all_gather", noted)

    def loop(model, x, t, r):
        parts = [torch.empty_like(x)]
        if before:
            torch.distributed.all_gather(parts, x)
        loss = losses_of(model(x + 0 * parts[0].nan_to_num(0.0, 0.0, 0.0) if before else x), t)
        if not before:
            torch.distributed.all_gather(parts, x)
        return loss.mean()

    with process_group(0, 1, str(tmp_path)):
        _Training().step(loop)
    assert len(asked) == 3


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.layers.forward, x, use_reentrant=False)


def test_a_part_that_runs_again_in_a_backward_begins_no_record(monkeypatch):
    training, inside, taken = _Training(first=_Checkpointed), [], []
    # Between such a value and the layers behind it the loss is looked at by backwards.
    training.model.get_submodule("_module.0").register_forward_hook(lambda *call: taken.append(call[2]))
    record_outputs = training.optimizer.clipper._evidence.record_outputs

    def noted(outputs):
        inside.append(_torch.in_backward())
        record_outputs(outputs)

    monkeypatch.setattr(training.optimizer.clipper._evidence, "record_outputs", noted)
    training.step(lambda m, x, t, r: losses_of(m(x), t) + taken[-1].square().sum(1))
    assert inside
    assert not any(inside)


def test_nothing_is_kept_of_a_step():
    training, held = _Training(), []

    def loop(model, x, t, r):
        output = model(x)
        each = losses_of(output, t)
        held.extend(map(weakref.ref, (output, each)))
        return each.mean()

    training.step(loop)
    gc.collect()
    assert len(held) == 6
    assert not any(one() is not None for one in held)


def test_after_a_loop_that_broke_off_the_next_one_is_recorded():
    training = _Training()

    def breaks(model, x, t, r):
        losses_of(model(x), t)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        training.step(breaks)
    with pytest.raises(LossReductionError):
        _Training().step(lambda m, x, t, r: _above_median(losses_of(m(x), t)))
    _Training().step(lambda m, x, t, r: losses_of(m(x), t))
    assert not _torch.active_modes()


@pytest.mark.parametrize("mode", [partial(torch.device, "cpu"), torch.overrides.BaseTorchFunctionMode])
def test_within_a_mode_that_may_end_nothing_is_recorded(mode):
    with mode():
        _Training().step(lambda m, x, t, r: _above_median(losses_of(m(x), t)))


def test_a_default_device_hides_nothing(default_device):
    default_device("cpu")
    with pytest.raises(LossReductionError):
        _Training().step(lambda m, x, t, r: _above_median(losses_of(m(x), t)))
    _Training().step(lambda m, x, t, r: losses_of(m(x), t).mean())


def _mixed(x):
    return 0.7 * x + 0.3 * x.roll(1, 0)


COMPILED = {
    "inputs": lambda c, m, x, t: losses_of(m(c(_mixed)(x)), t).mean(),
    "a loss": lambda c, m, x, t: c(lambda o, t: _above_median(losses_of(o, t)))(m(x), t),
    "a mask": lambda c, m, x, t: (e := losses_of(m(x), t), e * c(lambda e: e > e.median())(e.detach()))[1].mean(),
    "the model": lambda c, m, x, t: losses_of(c(m)(_mixed(x)), t).mean(),
    "model and loss": lambda c, m, x, t: c(lambda x, t: _above_median(losses_of(m(x), t)))(x, t),
    "something else": lambda c, m, x, t: (c(torch.sin)(x), _above_median(losses_of(m(x), t)))[1],
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_hide_nothing(name, backend):
    compiled = partial(torch.compile, backend=backend)
    training = _Training()
    with pytest.raises((LossReductionError, SampleMixingError), match="were replaced"):
        training.step(lambda m, x, t, r: COMPILED[name](compiled, m, x, t))
    assert training.optimizer.releases == 0
    del training
    gc.collect()
    assert not _torch.active_modes()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_functions_are_compiled_in_steps_that_are_not_checked_and_for_no_mode():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    shift, log = torch.compile(lambda x: x + 1, backend=backend), torch.compile(lambda x: x * 2, backend=backend)
    training = _Training()

    def loop(model, x, t, r):
        return losses_of(model(shift(x)), t).mean()

    zero_grad = training.optimizer.zero_grad
    for batch in training.loader:
        zero_grad()
        loss = loop(training.model, *batch)
        loss.backward()
        log(loss.detach())
        training.optimizer.step()
    assert len(graphs) == 2


@pytest.mark.parametrize("steps", [1, 2])
def test_a_script_that_ends_within_a_pass_prints_nothing(steps):
    script = f"""
import torch, ghostclip
model, data = torch.nn.Linear(4, 2), torch.utils.data.TensorDataset(torch.randn(40, 4))
model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=torch.utils.data.DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0)
batches = iter(loader)
for _ in range({steps}):
    (x,) = next(batches)
    loss = model(x).square().sum(1)
    kept = loss.detach()
    loss.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_record_that_ends_while_a_function_runs_is_not_opened_again():
    """The collector may take a loop at any moment, and ends its record then."""
    modes, loop = _torch.active_modes(), Loop(Unchecked(), is_on=True)
    LoopRecord(loop).begin([torch.ones(2)])
    torch.ones(1).apply_(lambda value: (LoopRecord.end(), value)[1])
    LoopRecord.end()
    assert (LoopRecord.entered, _torch.active_modes()) == ([], modes)
