"""Factors that all samples' losses have in common: public constants pass, what may follow the batch is refused.

Each program computes a loss from the samples' own losses and what a batch tells in Python. The same step is taken with
and without each record, after steps that went another way: the sum moves by C at most, or the program is refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError

BOUND = 0.1


class _Attack:
    """Batches in the last of which one record decides on what a batch tells."""

    def __init__(self, size=8):
        torch.manual_seed(2)
        self.model = nn.Linear(4, 3)
        self.easy = [(torch.randn(size, 4) * 0.01, torch.zeros(size, dtype=torch.int64)) for _ in range(3)]
        inputs, labels = torch.randn(size, 4) * 0.01, torch.zeros(size, dtype=torch.int64)
        inputs[3] = 40 * (self.model.weight[1] - self.model.weight[0]).detach()
        self.last = inputs, labels

    def sums(self, loss_of, reduction, left_out=()):
        """Return what the last step adds up to, in place of the losses of all records or of all but one."""
        kept = [sample for sample in range(len(self.last[0])) if sample not in left_out]
        with ghostclip.GhostClipper(self.model, max_grad_norm=BOUND, loss_reduction=reduction) as clipper:
            for step, (x, y) in enumerate([*self.easy, tuple(part[kept] for part in self.last)]):
                self.model.zero_grad()
                losses = functional.cross_entropy(self.model(x), y, reduction="none")
                clipper.backward(loss_of(losses, step))
            return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])

    def moved(self, loss_of, reduction):
        """Return how far the sum moves when that record, or another one, is left out, as a multiple of the bound."""
        whole = self.sums(loss_of, reduction)
        return max(float((whole - self.sums(loss_of, reduction, (sample,))).norm()) / BOUND for sample in (0, 3))


def _reduced(losses, form):
    return losses if form == "none" else getattr(losses, form)()


def _if(factor):
    def change(loss, losses):
        return factor(loss) if float(losses.detach().mean()) > 2 else loss

    return change


# What is done with a reduced loss (or with losses, alike for all) by what the batch tells.
FOLLOW = {
    "if: times": _if(lambda loss: loss * 0.01),
    "if: divided": _if(lambda loss: loss / 100),
    "if: negative": _if(lambda loss: -loss),
    "if: subtracted": _if(lambda loss: 0 - loss),
    "if: nothing": _if(lambda loss: loss * 0),
    "if: halves": _if(lambda loss: 0.5 * loss + 0.25 * loss),
    "if: in place": _if(lambda loss: loss.clone().mul_(0.01)),
    "if: alpha": _if(lambda loss: torch.sub(loss, loss, alpha=0.5)),
    "number": lambda loss, losses: loss * float(f"{1 + float(losses.detach().mean()):.2g}"),
    "count": lambda loss, losses: loss * len(losses) / (1000 + 7 * int((losses > 2).sum())),
    "quotient": lambda loss, losses: loss * (len(losses) / (1013 + 7 * int((losses > 2).sum()))),
    "where": lambda loss, losses: torch.where(losses.mean() > 2, loss * 0.01, loss),
    "where nothing": lambda loss, losses: torch.where(losses.detach().mean() > 2, torch.zeros_like(loss), loss),
    "guard": lambda loss, losses: torch.where(torch.isfinite(losses.sum()) & (losses.mean() < 2), loss, 0.0),
    "masked_fill": lambda loss, losses: loss.masked_fill(losses.mean() > 2, 0.0),
    "where, kept axes": lambda loss, losses: torch.where((losses.mean() > 2).expand_as(loss), loss * 0.01, loss),
    "tensor": lambda loss, losses: loss * (losses.detach().mean() < 2),
    "clamped": lambda loss, losses: (
        loss.clamp(max=1.0) if not loss.dim() else loss / losses.detach().sum().clamp(min=1)
    ),
}
# Public ones, by the number of the step.
PUBLIC = {
    "constant": lambda loss, step: loss * 0.7,
    "many digits": lambda loss, step: loss * 0.61803398,
    "what is left of one": lambda loss, step: (1 - 0.7) * loss + loss / 938,
    "two thirds": lambda loss, step: loss * 2 / 3,
    "batches of an epoch": lambda loss, step: loss / 938,
    "accumulated": lambda loss, step: loss * (1 / 12345),
    "divided": lambda loss, step: loss / 4,
    "subtracted": lambda loss, step: 2 * loss - loss,
    "negative": lambda loss, step: -loss,
    "schedule": lambda loss, step: ghostclip.losses.scheduled(loss, (1 + step) / 750),
    "term": lambda loss, step: loss + ghostclip.losses.scheduled(loss, step / 7),
    "from nothing": lambda loss, step: ghostclip.losses.scheduled(loss, float(step > 1)),
}


@pytest.mark.parametrize("form", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", FOLLOW)
def test_factors_that_follow_the_batch(name, form):
    def loss_of(losses, step):
        return FOLLOW[name](_reduced(losses, form), losses)

    reduction = "sum" if form == "sum" else "mean"
    with pytest.raises((LossReductionError, SampleMixingError)):
        _Attack().moved(loss_of, reduction)


@pytest.mark.parametrize("form", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_factors(name, form):
    def loss_of(losses, step):
        return PUBLIC[name](_reduced(losses, form), step)

    assert _Attack().moved(loss_of, "sum" if form == "sum" else "mean") <= 1 + 1e-6


def _terms(logits):
    return torch.stack([logits.square().mean(), logits.abs().mean(), logits.cos().mean()])


# Factors of several values: of terms, of features or of classes, alike for all samples.
SEVERAL = {
    "terms": lambda z, y, w: (_terms(z) * w).sum(),
    "terms, divided": lambda z, y, w: (_terms(z) / w).mean(),
    "joined terms": lambda z, y, w: (torch.cat([_terms(z), 2 * _terms(z)]) * w.repeat(2)).sum(),
    "features": lambda z, y, w: (z.square() * w).mean(),
    "features, kept axes": lambda z, y, w: (z.square() * w.unsqueeze(0)).sum(1).mean(),
    "features of a mean": lambda z, y, w: (z.square().mean(0) * w).sum(),
    "features of losses": lambda z, y, w: (z.square() * w).sum(1),
    "features, expanded": lambda z, y, w: (z.square() * w.expand_as(z)).sum(1).mean(),
    "a product": lambda z, y, w: (z.square() @ w).mean(),
    "a product of losses": lambda z, y, w: z.square() @ w,
    "a product of matrices": lambda z, y, w: functional.linear(z.square(), w[None], torch.ones_like(w[:1])).mean(),
    "a product for each sample": lambda z, y, w: torch.bmm(z[:, None], w[None, :, None].expand(len(z), -1, -1)).mean(),
    "an einsum": lambda z, y, w: torch.einsum("bk,k->b", z.square(), w).mean(),
    "lerp": lambda z, y, w: torch.lerp(z.abs(), z.square(), w).sum(1).mean(),
    "addcmul": lambda z, y, w: torch.addcmul(z.abs(), z.square(), w).sum(1).mean(),
    "features that are chosen": lambda z, y, w: torch.where(w > 0.6, z.square(), 0.0).mean(),
    "features that are filled": lambda z, y, w: z.square().masked_fill(w > 0.6, 0.0).sum(1),
    "classes": lambda z, y, w: functional.cross_entropy(z, y, weight=w, reduction="none").mean(),
    "classes of losses": lambda z, y, w: functional.cross_entropy(z, y, weight=w, reduction="none"),
    "classes, smoothed": lambda z, y, w: functional.cross_entropy(
        z, y, weight=w, reduction="none", label_smoothing=0.1
    ),
    "labels": lambda z, y, w: functional.binary_cross_entropy_with_logits(z, z.detach().sigmoid() ** 2, weight=w),
    "positive": lambda z, y, w: functional.binary_cross_entropy_with_logits(z, z.detach().sigmoid() ** 2, pos_weight=w),
    "probabilities": lambda z, y, w: functional.binary_cross_entropy(z.sigmoid(), z.detach().sigmoid() ** 2, weight=w),
    "margins": lambda z, y, w: functional.multi_margin_loss(z, y, weight=w),
}
FOLLOWING = {
    "softmax": lambda z, y: _terms(z.detach()).softmax(0),
    "deviation": lambda z, y: z.detach().var(0) + 0.1,
    "counts": lambda z, y: 1 / (1 + (z.detach() > 1).sum(0)).float(),
}


def _steps(attack, loss_of, factor):
    with ghostclip.GhostClipper(attack.model, max_grad_norm=BOUND) as clipper:
        for x, y in [*attack.easy, attack.last]:
            logits = attack.model(x)
            clipper.backward(loss_of(logits, y, FOLLOWING[factor](logits, y)))


@pytest.mark.parametrize("factor", FOLLOWING)
def test_factors_of_several_values_that_follow_the_batch(factor):
    for name, loss_of in SEVERAL.items():
        with pytest.raises(LossReductionError) as caught:
            _steps(_Attack(), loss_of, factor)
        # In the first step where the loop shows it, else where it changes.
        said = str(caught.value)
        assert "half of the samples were replaced" in said or "that held other values in earlier steps" in said, name


def test_factors_of_several_values_that_are_public():
    """The norms are those of each sample alone, and nothing is refused, whatever the size of the batch."""
    torch.manual_seed(0)
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    model = nn.Linear(4, 3).double()
    for name, loss_of in SEVERAL.items():
        alone_B = []
        for one in range(9):
            grads = torch.autograd.grad(loss_of(model(x[[one]]), y[[one]], weights).sum(), [*model.parameters()])
            alone_B.append(torch.cat([grad.flatten() for grad in grads]).norm())
        with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
            for size in (9, 4, 3, 2, 1, 7):
                clipper.backward(loss_of(model(x[:size]), y[:size], weights))
                expected_B = torch.stack(alone_B[:size])
                torch.testing.assert_close(clipper.per_sample_norms, expected_B, rtol=1e-9, atol=1e-12, msg=name)


# Weights that each sample has of its own: they differ from batch to batch.
OWN = {
    "samples": lambda z, w_BK: (z.square().sum(1) * w_BK[:, 0]).mean(),
    "samples of losses": lambda z, w_BK: z.square().sum(1) * w_BK[:, 0],
    "values": lambda z, w_BK: (z.square() * w_BK).mean(),
    "kept axes": lambda z, w_BK: (z.square() * w_BK[:, :1]).mean(),
    "chosen": lambda z, w_BK: torch.where(w_BK > 0.5, z.square(), 0.0).mean(),
    "chosen samples": lambda z, w_BK: z.square().masked_fill(w_BK[:, :1] > 0.5, 0.0).sum(1),
    "expanded": lambda z, w_BK: (z.square() * w_BK[:, :1].expand(-1, 3)).sum(1),
    "flat": lambda z, w_BK: (z.square().flatten() * w_BK.flatten()).mean(),
    "one by one": lambda z, w_BK: (torch.stack([one.square().sum() for one in z]) * w_BK[:, 0]).mean(),
    "labels": lambda z, w_BK: functional.binary_cross_entropy_with_logits(z, torch.zeros_like(z), weight=w_BK[:, :1]),
    "one by one, of features": lambda z, w_BK: torch.stack(
        [(one.square() * w).sum() for one, w in zip(z, w_BK, strict=True)]
    ),
}


def test_weights_of_each_sample_may_differ_from_batch_to_batch():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    for loss_of in OWN.values():
        with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
            for size in (9, 3, 4, 6, 2, 1, 3, 7, 9):
                clipper.backward(loss_of(model(torch.randn(size, 4)), torch.rand(size, 3)))


# Weights (B,) that were normalised over the batch, of numbers (B,).
NORMALISED = {
    "a softmax": lambda r: r.softmax(0),
    "parts of a sum": lambda r: r.abs() / r.abs().sum(),
    "parts of a mean": lambda r: r.abs() / r.abs().mean(),
    "deviations": lambda r: r - r.mean(),
    "advantages of far returns": lambda r: ((200 + 5 * r) - (200 + 5 * r).mean()) / ((200 + 5 * r).std() + 1e-8),
    "advantages of two rewards": lambda r: ((r > 0).to(r) - (r > 0).to(r).mean()) / (r > 0).to(r).std(),
}
# Losses (B,) of logits (B, K), classes and such weights.
WEIGHTED = {
    "losses": lambda z, y, w: functional.cross_entropy(z, y, reduction="none") * w,
    "their mean": lambda z, y, w: (functional.cross_entropy(z, y, reduction="none") * w).mean(),
    "divided": lambda z, y, w: functional.cross_entropy(z, y, reduction="none") / w,
    "kept axes": lambda z, y, w: (z.square() * w[:, None]).mean(),
    "labels": lambda z, y, w: functional.binary_cross_entropy_with_logits(
        z, z.detach().sigmoid() ** 2, weight=w[:, None]
    ),
    "PPO": lambda z, y, w: -torch.min(_ratio(z, y) * w, _ratio(z, y).clamp(0.8, 1.2) * w).mean(),
}


def _ratio(z, y):
    chosen = z.log_softmax(1).gather(1, y[:, None])[:, 0]
    return (chosen - chosen.detach() + torch.linspace(-0.3, 0.3, len(z))).exp()


@pytest.mark.parametrize("weights", NORMALISED)
def test_weights_that_were_normalised_over_the_batch_are_refused(weights):
    torch.manual_seed(0)
    logits, r, y = nn.Linear(4, 3), torch.randn(12), torch.arange(12) % 3
    for name, loss_of in WEIGHTED.items():
        with ghostclip.GhostClipper(logits, max_grad_norm=BOUND) as clipper:
            loss = loss_of(logits(torch.randn(12, 4)), y, NORMALISED[weights](r))
            with pytest.raises(LossReductionError) as caught:
                clipper.backward(loss)
        assert "normalised over the batch" in str(caught.value), name


# Weights of numbers (B,) and classes of which none depends on another sample, whatever they add up to by chance.
BY_THEMSELVES = {
    "numbers": lambda r, y: r,
    "of classes, of mean 1": lambda r, y: torch.tensor([0.5, 1.0, 1.5])[y],
    "of classes, of sum 0": lambda r, y: torch.tensor([-1.0, 0.0, 1.0])[y],
    "less a baseline": lambda r, y: r - 0.1,
    "of another batch's mean": lambda r, y: r - 0.0437281,
    # Of six records each has another one.
    "written down, of sum 1": lambda r, y: torch.tensor([0.05, 0.1, 0.15, 0.2, 0.22, 0.28] * 2, dtype=r.dtype)[
        : len(y)
    ],
}


@pytest.mark.parametrize("size", [6, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", BY_THEMSELVES)
def test_weights_of_samples_by_themselves_are_not(weights, dtype, size):
    for seed in range(8):
        torch.manual_seed(seed)
        logits, r, y = nn.Linear(4, 3).to(dtype), torch.randn(size, dtype=dtype), torch.arange(size) % 3
        x = torch.randn(size, 4, dtype=dtype)
        with ghostclip.GhostClipper(logits, max_grad_norm=BOUND) as clipper:
            clipper.backward(WEIGHTED["losses"](logits(x), y, BY_THEMSELVES[weights](r, y)))


def test_public_weights_of_as_many_features_as_samples_may_add_up_to_one():
    torch.manual_seed(0)
    model, weights = nn.Linear(4, 12), torch.linspace(-2, 2, 12).square().neg().softmax(0)
    with ghostclip.GhostClipper(model, max_grad_norm=BOUND) as clipper:
        clipper.backward((model(torch.randn(12, 4)).square() * weights).sum(1))


COUNTS = {
    "tokens": lambda ids, mask: int(mask.sum()),
    "tokens that are predicted": lambda ids, mask: int(mask[:, 1:].sum()),
    "no padding": lambda ids, mask: int((ids != 7).sum()),
}


@pytest.mark.parametrize("form", ["none", "mean", "sum"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("divides", [True, False])
def test_a_count_of_the_batch_is_met_in_the_first_step(count, form, divides):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids, mask):
            return self.head((self.embedding(ids) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    torch.manual_seed(0)
    ids, lengths = torch.randint(7, (6, 23)), torch.tensor([23, 20, 11, 7, 22, 18])
    mask = (torch.arange(23) < lengths.unsqueeze(1)).long()
    ids, model = ids.where(mask > 0, 7), Pooled()
    number = COUNTS[count](ids, mask)
    reduction = "sum" if form == "sum" else "mean"
    with ghostclip.GhostClipper(model, max_grad_norm=BOUND, loss_reduction=reduction) as clipper:
        losses = functional.cross_entropy(model(ids, mask), torch.arange(6) % 3, reduction="none")
        factor = 6 / number if divides else 1 / number
        with pytest.raises(LossReductionError, match=r"number of the batch|divided by a number"):
            clipper.backward(_reduced(losses, form) * factor)


@pytest.mark.parametrize("form", ["none", "mean"])
def test_a_schedule_that_is_not_declared_is_told_the_line_that_does(form):
    attack = _Attack()
    with pytest.raises(LossReductionError, match=r"ghostclip\.losses\.scheduled\(loss, factor\)"):
        attack.moved(lambda losses, step: _reduced(losses, form) * (0.1 + 0.1 * step), "mean")


def test_weights_of_samples_are_no_factor_of_all():
    """Also in a batch of one sample, where its weight is the only one."""
    model, weights = nn.Linear(4, 3), torch.tensor([0.5, 2.0, 100.0])
    x = torch.randn(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for rows in ([0, 1, 2], [1], [2], [0, 2]):
            clipper.backward(model(x[rows]).square().sum(1) * weights[rows])


def test_signs_of_terms():
    """What is subtracted in one step and added in the next one has another factor."""
    attack = _Attack()
    kept = attack.moved(lambda losses, step: (3 * losses - torch.neg(losses)).mean(), "mean")
    assert kept <= 1 + 1e-6
    with pytest.raises(LossReductionError, match="times -2"):
        attack.moved(lambda losses, step: (losses * (1 if step < 2 else -2)).mean(), "mean")


def test_a_loss_times_zero_adds_nothing():
    model = nn.Linear(4, 3)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        clipper.backward(model(torch.randn(5, 4)).square().mean() * 0)
        assert all(not parameter.grad.any() for parameter in model.parameters())


def _labels(z, **options):
    return functional.binary_cross_entropy_with_logits(z, (z.detach() > 0).float(), **options)


# Weights of samples, where there are as many positions, or classes, as samples.
IN_A_SQUARE = {
    "positions first": lambda z, w: (z.square().transpose(0, 1).sum(2) * w).sum(0).mean(),
    "positions first, kept axes": lambda z, w: (z.square().transpose(0, 1) * w[:, None]).sum(2).sum(0).mean(),
    "positions first, summed": lambda z, w: (z.square().transpose(0, 1).sum(2).sum(0) * w).mean(),
    "classes first": lambda z, w: (z.square().sum(1).t() * w).sum(0).mean(),
    "samples by themselves": lambda z, w: (
        sum((one.square() * one.detach().square()[:, :1]).sum() for one in z) / len(w)
    ),
    "labels by themselves": lambda z, w: (
        sum(_labels(one, weight=one[:, :1].detach().exp(), reduction="sum") for one in z) / len(w)
    ),
}


@pytest.mark.parametrize("name", IN_A_SQUARE)
@pytest.mark.parametrize("positions", [3, 4])
def test_weights_of_samples_in_a_square(name, positions):
    """Each sample's own weight is no factor that samples have in common, whatever else is as long as the batch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with ghostclip.GhostClipper(model, max_grad_norm=BOUND) as clipper:
        for size in (3, 3, 4, 4):
            clipper.backward(IN_A_SQUARE[name](model(torch.randn(size, positions, 4)), torch.rand(size)))


OWN = {
    "a vector for each sample": lambda z, y: torch.bmm(y[:, None], z[:, :, None]).mean(),
    "a vector for each sample, added": lambda z, y: torch.baddbmm(z[:, :1, None], y[:, None], z[:, :, None]).mean(),
    "an einsum": lambda z, y: torch.einsum("bk,bk->b", z.square(), y).mean(),
    "lerp": lambda z, y: torch.lerp(z.abs(), z.square(), y).sum(1).mean(),
    "addcmul": lambda z, y: torch.addcmul(z.abs(), z.square(), y).sum(1).mean(),
    "public": lambda z, y: (z.square() @ torch.tensor([0.5, 2.0, 1.0], dtype=z.dtype)).mean(),
}


@pytest.mark.parametrize("name", OWN)
def test_what_each_sample_has_of_its_own_may_stand_in_a_product(name):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    with ghostclip.GhostClipper(model, max_grad_norm=BOUND) as clipper:
        for size in (5, 3, 4, 7, 5):
            x, y = torch.randn(size, 4, dtype=torch.float64), torch.rand(size, 3, dtype=torch.float64)
            clipper.backward(OWN[name](model(x), y))
            assert clipper.batch_size == size
