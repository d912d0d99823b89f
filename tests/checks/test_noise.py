"""Kernels that do not repeat themselves are no reason to refuse a model, and hide no model that is one.

Flash attention's backward on a GPU adds up in no fixed order: through sixteen layers in bfloat16 the same gradient was
off by 1.5e-2 of itself, and atomic additions in float32 by some 1e-6. Both are emulated here, see `Noise`.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import GhostClipError, LossReductionError, SampleMixingError
from tests.checks.noisy import ATOMICS, ATTENTION, LENGTH, WORDS, Decoder, Noise, losses_of, with_lora

# Seeds tell sizes of batches apart as well; most are run by `make test-slow`.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
# Of each kind: the model, what it runs under, how much kernels are off by, and which.
KINDS = {
    "bfloat16 with float32 adapters": (with_lora, nullcontext, 2**-7, ATTENTION),
    "bfloat16 autocast": (nn.Module.train, lambda: torch.autocast("cpu", torch.bfloat16), 2**-7, ATTENTION),
    "float32 atomics": (nn.Module.train, nullcontext, 2**-20, ATTENTION + ATOMICS),
}


class _Own(torch.autograd.Function):
    """The identity, with a backward of one's own."""

    @staticmethod
    def forward(ctx, h, change):
        ctx.change = change
        ctx.save_for_backward(h)
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad.float(), ctx.saved_tensors[0].float()).to(grad.dtype), None


MIXING = {
    "unit norm": lambda: lambda grad, _: grad / grad.norm(),
    "largest": lambda: lambda grad, _: grad / grad.abs().max(),
    "mean removed": lambda: lambda grad, _: grad - grad.mean(0),
    "a deviation of the batch": lambda: lambda grad, values: grad / values.std(0).mean(),
}


def _trained(kind, seed, strategy="bookkeeping", *, between=None, size=5, loss=None, steps=1):
    prepare, context, share, kernels = KINDS[kind]
    torch.manual_seed(seed)
    model = prepare(Decoder(2, between))
    with ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy=strategy) as clipper:
        with Noise(share, seed=seed, of=kernels) as noise:
            for _ in range(steps):
                ids = torch.randint(WORDS, (size, LENGTH))
                with context():
                    losses_B = losses_of(model, ids)
                (clipper.backward if loss is None else loss)(losses_B)
        assert noise.met
        return clipper.batch_size


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [*((kind, "bookkeeping") for kind in KINDS), *((next(iter(KINDS)), other) for other in ("ghost", "fast", "hooks"))],
)
def test_a_backward_that_does_not_repeat_itself_is_no_refusal(kind, strategy, seed):
    assert _trained(kind, seed, strategy, size=2 + seed % 7) == 2 + seed % 7


@pytest.mark.parametrize("kind", ["bfloat16 with float32 adapters", "float32 atomics"])
def test_nor_in_later_proofs_and_beside_functions_that_follow_nothing(kind):
    def between(h):
        return _Own.apply(h, lambda grad, values: -0.7 * grad * (values.abs() < 2))

    assert _trained(kind, 0, between=between, loss=lambda losses_B: losses_B.mean().backward(), steps=4) == 5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "mixing"),
    [("bfloat16 with float32 adapters", "a deviation of the batch"), ("bfloat16 autocast", "largest")],
)
def test_one_that_follows_the_batch_is_refused_all_the_same(kind, mixing, seed):
    """By the second proof: two samples whose largest gradients are alike by chance show little in the first."""
    change = MIXING[mixing]()
    with pytest.raises(GhostClipError, match=r"batch|mean over|not scaled"):
        _trained(kind, seed, between=lambda h: _Own.apply(h, change), size=2 + seed % 7, steps=4)


@pytest.mark.parametrize(
    ("kind", "way"), [("bfloat16 autocast", "clamped"), ("float32 atomics", "each row by its norm")]
)
def test_so_is_one_that_does_not_follow_its_scale(kind, way):
    change = {
        "clamped": lambda grad, _: grad.clamp(-1e-4, 1e-4),
        "each row by its norm": lambda grad, _: grad / grad.norm(dim=-1, keepdim=True).clamp(min=1e-12),
    }[way]
    with pytest.raises(LossReductionError, match="not scaled as the loss"):
        _trained(kind, 0, between=lambda h: _Own.apply(h, change), loss=lambda losses_B: losses_B.mean().backward())


class _Routed(nn.Module):
    """Experts whose outputs are added up where an index says, which a GPU does in no fixed order."""

    def __init__(self):
        super().__init__()
        self.embedding, self.router = nn.Embedding(WORDS, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(3):
            flat = x.flatten(0, 1)
            added = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                share = self.router(flat).softmax(-1)[:, number : number + 1]
                everyone = torch.arange(len(flat))
                added = added.index_add(0, everyone, expert(flat[everyone]) * share)
            x = x + torch.tanh(added).view_as(x)
        return self.head(x)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 2**-20), (torch.bfloat16, 2**-8)])
def test_a_forward_that_adds_up_in_another_order_each_time_is_none(dtype, share):
    model, ids = _Routed().to(dtype), torch.randint(WORDS, (5, LENGTH))
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        with Noise(share, of=ATOMICS, forwards=True) as noise:
            clipper.backward(losses_of(model, ids))
        assert noise.met
        assert clipper.batch_size == 5


class _Casts(nn.Module):
    """A float32 model that turns autocast on by itself, and rounds otherwise where no gradient is asked for."""

    def __init__(self, *, mixing=False):
        super().__init__()
        self.first, self.second, self.mixing = nn.Linear(6, 8), nn.Linear(8, 3), mixing

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
            hidden = hidden if torch.is_grad_enabled() else hidden * (1 + 2**-7)
            output = self.second(hidden).float()
        return output + output.detach().mean(0) if self.mixing else output


class _Thresholds(nn.Module):
    """A model that chooses by what rounding decides: otherwise where no gradient is asked for."""

    def __init__(self, *, mixing=False):
        super().__init__()
        self.first, self.second, self.mixing = nn.Linear(6, 8), nn.Linear(8, 3), mixing

    def forward(self, x):
        hidden = self.first(x)
        output = self.second(hidden.relu() if torch.is_grad_enabled() else hidden.tanh())
        return output + output.detach().mean(0) if self.mixing else output


_ROUNDED = {"autocast within": _Casts, "a choice": _Thresholds}


@pytest.mark.parametrize("name", _ROUNDED)
def test_rounding_within_the_model_is_no_dependence(strategy, name):
    with ghostclip.GhostClipper(_ROUNDED[name](), max_grad_norm=0.1, strategy=strategy) as clipper:
        clipper.backward(clipper.model(torch.randn(6, 6)).square().sum(1))
        assert clipper.batch_size == 6


@pytest.mark.parametrize("name", _ROUNDED)
def test_mixing_beside_such_rounding_is_refused(strategy, name):
    with ghostclip.GhostClipper(_ROUNDED[name](mixing=True), max_grad_norm=0.1, strategy=strategy) as clipper:
        with pytest.raises(SampleMixingError):
            clipper.backward(clipper.model(torch.randn(6, 6)).square().sum(1))


def test_two_backwards_with_and_without_a_batch_are_told_apart_in_a_hook():
    change = MIXING["unit norm"]()

    def between(h):
        h.register_hook(lambda grad: change(grad.float(), None).to(grad.dtype))
        return h

    with pytest.raises(SampleMixingError, match="when other samples' gradients came with it"):
        _trained("bfloat16 autocast", 3, between=between)
