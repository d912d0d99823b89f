"""Losses whose function is known are computed with other samples: what weighs a sample by the others is refused."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.checks.losses import KnownLoss
from ghostclip.errors import LossReductionError
from ghostclip.facade import PrivateCriterion

C, BATCH = 5, 12


def losses_of(output, target, **options):
    return functional.cross_entropy(output, target, reduction="none", **options)


# Outputs (B, C), classes (B,) and a number of each sample (B,), which no gradient leads through.
FOLLOW = {
    "a softmax of losses": lambda o, t, r: losses_of(o, t) * losses_of(o, t).detach().softmax(0),
    "an advantage of mean 0": lambda o, t, r: losses_of(o, t) * (r - r.mean()),
    "an advantage of variance 1": lambda o, t, r: losses_of(o, t) * ((r - r.mean()) / (r.std() + 1e-8)),
    "weights that add up to 1": lambda o, t, r: losses_of(o, t) * (r.abs() / r.abs().sum()),
    "the harder half": lambda o, t, r: losses_of(o, t) * (losses_of(o, t).detach() >= losses_of(o, t).median()),
    "above the mean": lambda o, t, r: losses_of(o, t).where(losses_of(o, t).detach() > losses_of(o, t).mean(), o[:, 0]),
    "weights of classes in the batch": lambda o, t, r: losses_of(o, t) * (len(t) / t.bincount(minlength=C))[t],
    "targets of mean 0": lambda o, t, r: (o[:, 0] - (r - r.mean())) ** 2,
    "ranks": lambda o, t, r: losses_of(o, t) * r.argsort().argsort(),
    "mixed targets": lambda o, t, r: (o[:, 0] - 0.5 * (r + r.flip(0))) ** 2,
    "returns so far": lambda o, t, r: losses_of(o, t) * r.cumsum(0),
    "the number before": lambda o, t, r: losses_of(o, t) * r.roll(1),
    "one number for one": lambda o, t, r: losses_of(o, t) * (1 + (torch.arange(len(r)) == 0) * r[5 % len(r)].abs()),
    "a temperature of the batch": lambda o, t, r: losses_of(o / o.detach().std(), t),
    "labels of centred outputs": lambda o, t, r: losses_of(o, (o.detach() - 9 * o.detach().mean(0)).argmax(1)),
    "a gradient alone": lambda o, t, r: (w := losses_of(o, t) * (r - r.mean())) - w.detach() + losses_of(o, t).detach(),
}
OWN = {
    "weights of classes": lambda o, t, r: losses_of(o, t, weight=torch.arange(1.0, C + 1).to(o)),
    "focal": lambda o, t, r: losses_of(o, t) * (1 - torch.exp(-losses_of(o, t).detach())) ** 2,
    "its own weight": lambda o, t, r: losses_of(o, t) * r.abs(),
    "noise on targets": lambda o, t, r: (o[:, 0] - (r + torch.randn_like(r))) ** 2,
    "dropout": lambda o, t, r: losses_of(functional.dropout(o, 0.3), t),
    "sorted classes": lambda o, t, r: (o.sort(1).values * torch.arange(C).to(o)).sum(1),
    "not finite": lambda o, t, r: losses_of(o, t).where(r < 1, torch.inf),
    "nothing": lambda o, t, r: (o * 0).sum(1),
}


class Module(nn.Module):
    """A criterion as people write them: with a reduction, and something that it counts."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.reduction, self.calls = loss, "mean", 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        self.total += 1
        losses_B = self.loss(output, target[:, 0].long(), target[:, 1])
        return losses_B if self.reduction == "none" else losses_B.mean()


def records(count=8 * BATCH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, C, (count,), generator=generator).double()
    return TensorDataset(x, torch.stack([classes, torch.randn(count, generator=generator).double()], 1))


def in_a_loop(criterion, *, model=None, steps=4, mean=False, **options):
    """Train by the criterion that `make_private` returns; ``mean``: over the losses that it returns."""
    torch.manual_seed(0)
    model = (model or nn.Linear(4, C)).double()
    model, optimizer, criterion, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=criterion,
        **options,
    )
    for x, target in [batch for batch in loader if len(batch[0]) > 1][:steps]:
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(*(output if isinstance(output, tuple) else (output,)), target)
        (loss.mean() if mean else loss).backward()
        optimizer.step()
    return model


@dataclass
class Outputs:
    """What a model returns that is no container to torch."""

    logits: torch.Tensor


class Wrapping(nn.Linear):
    def __init__(self, wrap):
        super().__init__(4, C)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


def as_a_step(loss):
    """Compute batches by `GraphStep`."""
    clipper = ghostclip.GhostClipper(nn.Linear(4, C).double(), max_grad_norm=1.0, strategy="graph")
    options = ghostclip.GraphOptions(backend="aten")
    step = ghostclip.GraphStep(clipper, lambda model, x, t, r: loss(model(x), t, r), options=options)
    x, target = records(64).tensors
    step(x, target[:, 0].long(), target[:, 1])


def on_targets(loss):
    return lambda output, target: loss(output, target[:, 0].long(), target[:, 1])


WAYS = {
    "a module": lambda loss: in_a_loop(Module(loss)),
    "a module, two passes": lambda loss: in_a_loop(Module(loss), grad_sample_mode="ghost"),
    "a function of losses": lambda loss: in_a_loop(on_targets(loss), mean=True),
    "a function of their mean": lambda loss: in_a_loop(lambda o, target: on_targets(loss)(o, target).mean()),
    # Nothing divides it, so that it is clipped as a sum although a mean was declared.
    "a function of their sum": lambda loss: in_a_loop(lambda o, target: on_targets(loss)(o, target).sum()),
    "a compiled step": as_a_step,
}


# A compiled step's inputs have no gradients in which the first would show; labels are others only beyond a threshold.
UNSEEN = {("a compiled step", "a gradient alone"), ("a compiled step", "labels of centred outputs")}
SHOWN = [(way, loss) for way in WAYS for loss in FOLLOW if (way, loss) not in UNSEEN]


OUTPUTS = {
    "a data class": (Outputs, lambda output: output.logits),
    "a mapping": (lambda logits: UserDict(logits=logits), lambda output: output["logits"]),
    "a distribution": (lambda logits: torch.distributions.Categorical(logits=logits), lambda output: output.logits),
}


@pytest.mark.parametrize("way", OUTPUTS)
@pytest.mark.parametrize("kind", ["function", "module"])
def test_outputs_of_a_class_are_looked_into(way, kind):
    wrap, logits = OUTPUTS[way]

    def train(loss):
        of_outputs = lambda o, *given: loss(logits(o), *given)  # noqa: E731 - `Module` and `on_targets` take one
        criterion = Module(of_outputs) if kind == "module" else lambda o, t: on_targets(of_outputs)(o, t).mean()
        in_a_loop(criterion, model=Wrapping(wrap))

    train(OWN["focal"])
    with pytest.raises(LossReductionError, match="criterion"):
        train(FOLLOW["a softmax of losses"])


def test_a_loss_of_outputs_that_are_no_argument_is_said_not_to_be_checked():
    model = Wrapping(lambda logits: logits)
    kept = []
    model.register_forward_hook(lambda module, args, output: kept.append(output) and None)
    private, optimizer, criterion, loader = (engine := ghostclip.PrivacyEngine()).make_private(
        module=model.double(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=lambda _, target: on_targets(OWN["focal"])(kept[-1], target).mean(),
    )
    x, target = next(batch for batch in loader if len(batch[0]) > 1)
    private(x)
    criterion(None, target).backward()
    optimizer.step()
    assert "no argument of the criterion" in engine.summary(delta=1e-3)


def by_the_largest(output, target):
    losses = (output[:, 0] - target[:, 1]) ** 2
    return losses / 2 if losses.detach().max() > 50 else losses


@pytest.mark.parametrize("reduced", [False, True])
def test_a_branch_that_the_losses_of_no_batch_have_taken_is_refused(reduced):
    with pytest.raises(LossReductionError, match="several times larger"):
        in_a_loop(lambda o, t: by_the_largest(o, t).mean() if reduced else by_the_largest(o, t), mean=not reduced)


@pytest.mark.parametrize(("way", "loss"), SHOWN)
def test_a_loss_that_follows_the_batch_is_refused(way, loss):
    with pytest.raises(LossReductionError, match="no gradient leads from one to the other"):
        WAYS[way](FOLLOW[loss])


@pytest.mark.parametrize("loss", OWN)
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_of_each_sample_alone_is_not(way, loss):
    WAYS[way](OWN[loss])


class Remembers(nn.Module):
    """A criterion that hands something of a batch on to the next, or only counts batches."""

    def __init__(self, what):
        super().__init__()
        self.what, self.reduction, self.kept, self.losses = what, "mean", 0.0, [0.0]
        self.register_buffer("center", torch.zeros(C, dtype=torch.float64))

    def forward(self, output, target):
        losses_B = getattr(self, self.what)(output, target[:, 0].long())
        return losses_B if self.reduction == "none" else losses_B.mean()

    def threshold(self, output, labels):
        losses_B = losses_of(output, labels)
        above_B, self.kept = losses_B.detach() > self.kept, losses_B.detach().mean()
        return losses_B * above_B

    def history(self, output, labels):
        losses_B = losses_of(output, labels)
        shares_B = torch.sigmoid(losses_B.detach() - sum(self.losses[-5:]))
        self.losses.append(losses_B.detach().mean().item())
        return losses_B * shares_B

    def centered(self, output, labels):
        targets_BC = ((output.detach() - self.center) / 0.1).softmax(1)
        self.center.mul_(0.5).add_(output.detach().mean(0), alpha=0.5)
        return -(targets_BC * output.log_softmax(1)).sum(1)

    def schedule(self, output, labels):
        self.kept += 1
        return losses_of(output / (1 + 1 / self.kept), labels)

    def log(self, output, labels):
        losses_B = losses_of(output, labels)
        self.losses.append(losses_B.detach().mean().item())
        return losses_B


REMEMBERING = {
    "a module": lambda what: in_a_loop(Remembers(what)),
    "a module, two passes": lambda what: in_a_loop(Remembers(what), grad_sample_mode="ghost"),
    "a function of their mean": lambda what: in_a_loop(Remembers(what).__call__),
}


@pytest.mark.parametrize("way", REMEMBERING)
@pytest.mark.parametrize("what", ["threshold", "history", "centered"])
def test_a_loss_that_follows_the_batch_before_is_refused(what, way):
    with pytest.raises(LossReductionError, match="keeps something of a batch for later ones"):
        REMEMBERING[way](what)


@pytest.mark.parametrize("way", REMEMBERING)
@pytest.mark.parametrize("what", ["schedule", "log"])
def test_a_loss_that_counts_or_notes_batches_is_not(what, way):
    REMEMBERING[way](what)


def test_looks_leave_nothing_in_a_criterion():
    criterion = Module(OWN["noise on targets"])
    model = in_a_loop(criterion, steps=1, grad_sample_mode="ghost")
    assert (criterion.calls, float(criterion.total)) == (1, 1.0)
    assert "criterion" not in str(model.clipper.unchecked)


def test_looks_leave_random_numbers_as_they_are():
    drawn = []
    for checked in (True, False):
        clipper, criterion = of_a_model(OWN["dropout"])
        clipper.know_loss = clipper.know_loss if checked else lambda *args, **kwargs: None
        back(clipper, criterion, BATCH)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def of_a_model(loss):
    torch.manual_seed(0)
    clipper = ghostclip.GhostClipper(nn.Linear(4, C).double(), max_grad_norm=1.0, strategy="ghost")
    return clipper, PrivateCriterion(clipper, loss)


def back(clipper, criterion, count, *rest):
    x, target = records(count).tensors
    criterion(clipper.model(x), target[:, 0].long(), target[:, 1], *rest).backward()


def test_a_table_that_is_as_long_as_the_batch_is_told_by_the_next_one():
    table = torch.arange(1.0, C + 1).double()
    clipper, criterion = of_a_model(lambda o, t, r, weights: losses_of(o, t) * weights[t])
    back(clipper, criterion, C, table)
    assert "as many rows as there are samples" in str(clipper.unchecked)
    back(clipper, criterion, BATCH, table)
    assert "criterion" not in str(clipper.unchecked)


def test_labels_that_enter_by_their_number_alone_are_told_by_a_batch_of_another_size():
    clipper, criterion = of_a_model(lambda o, t, r: (o[:, 0] - o[:, 1].detach() * t.count_nonzero()) ** 2)
    back(clipper, criterion, C)
    assert "as many rows as there are samples" in str(clipper.unchecked)
    with pytest.raises(LossReductionError, match="half of the samples were replaced"):
        back(clipper, criterion, BATCH)


def test_what_cannot_be_computed_with_other_samples_is_said():
    def particular(o, t, r):
        if not torch.equal(r, records(BATCH).tensors[1][:, 1]):
            raise ValueError("only these")
        return losses_of(o, t)

    clipper, criterion = of_a_model(particular)
    back(clipper, criterion, BATCH)
    assert "losses of a known criterion (samples replaced)" in str(clipper.unchecked)


@pytest.fixture
def seen(monkeypatch):
    """Shapes of the first argument in every look: what a criterion notes by itself is put back."""
    shapes, computed = [], KnownLoss._computed

    def noting(self, inputs, *args, **kwargs):
        shapes.append(inputs[0][0].shape)
        return computed(self, inputs, *args, **kwargs)

    monkeypatch.setattr(KnownLoss, "_computed", noting)
    return shapes


@pytest.mark.parametrize("follows", [True, False])
def test_positions_that_lie_flat_are_exchanged_by_sample(follows, seen):
    def loss(output, target):
        losses_N = losses_of(output, target)
        return losses_N * (losses_N.detach() - (losses_N.detach().mean() if follows else 0))

    clipper, criterion = of_a_model(loss)
    x, target = torch.randn(BATCH, 3, 4).double(), torch.randint(0, C, (BATCH, 3))
    private = criterion(clipper.model(x).flatten(0, 1), target.flatten(), shape=(BATCH, 3))
    if follows:
        with pytest.raises(LossReductionError, match="no gradient leads"):
            private.backward()
    else:
        private.backward()
    assert {tuple(shape[1:]) for shape in seen} == {(3, C)}


@pytest.mark.parametrize("mean", [True, False])
def test_a_temperature_that_is_learned_beside_the_outputs_has_no_samples(mean):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, C), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale * 2, self.layer(x)

    def loss(scale, output, target):
        losses_B = losses_of(output * scale, target[:, 0].long())
        return losses_B.mean() if mean else losses_B

    model = in_a_loop(loss, model=Scaled(), mean=not mean)
    assert "criterion" not in str(model.clipper.unchecked)
