"""A vocabulary head whose logits are never held: values, norms and sums in many tiles, memory, and operations."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import GPT
from ghostclip import GhostClipper
from ghostclip.errors import DataError, TamperedGradientError
from ghostclip.kernels import head
from ghostclip.losses import linear_cross_entropy
from tests.cases import by_name
from tests.cases.head import CASES
from tests.cases.head import Head as Model
from tests.exactness import tolerances
from tests.exactness.runs import check_norms, check_sensitivity, check_sum, engine, expected, run

OPTIONS = {"label_smoothing": 0.1, "logit_scale": 1.4, "logit_cap": 1.5, "z_loss": 0.02}


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles and chunks, as of a large vocabulary."""
    monkeypatch.setattr(head, "TILE", 60)
    monkeypatch.setattr(head, "ROWS", 20)
    monkeypatch.setattr(head, "NARROWEST", 3)
    monkeypatch.setattr(head, "SUBTILE", 100)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_tiles_match_one_sample_autograd(case, dtype, strategy):
    outcome = run(case, engine(strategy), dtype)
    check_sum(outcome, expected(case.name), dtype)
    check_norms(outcome, expected(case.name), dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["head_tied_bias_long", "head_every_option", "head_picked", "head_checkpointed"])
def test_norms_from_gram_matrices_match_one_sample_autograd(name, strategy, monkeypatch):
    """Of a vocabulary as small as these the gradient is the cheaper form."""
    monkeypatch.setattr(head, "prefers_gram", lambda *sizes: True)
    for dtype in (torch.float64, torch.float32):
        outcome = run(by_name(name), engine(strategy), dtype)
        check_sum(outcome, expected(name), dtype)
        check_norms(outcome, expected(name), dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["head_tied", "head_every_option", "head_tied_bias_long", "head_picked"])
def test_one_sample_moves_the_sum_of_many_tiles_by_at_most_the_bound(name, strategy):
    check_sensitivity(by_name(name), engine(strategy), torch.float32)


# Values


def _plain(hidden, weight, labels, bias, options):
    """The same loss from logits."""
    z = functional.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    z = z * options.get("logit_scale", 1.0)
    if "logit_cap" in options:
        z = torch.tanh(z / options["logit_cap"]) * options["logit_cap"]
    losses = functional.cross_entropy(
        z.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
    )
    return losses.view(labels.shape) + options.get("z_loss", 0.0) * z.logsumexp(-1).square() * (labels != -100)


def _data(dtype, *, samples=3, positions=7, features=5, vocabulary=150):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(samples, positions, features, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, features, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (samples, positions), generator=generator)
    labels[0, positions // 3] = -100
    grad = torch.randn(samples, positions, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return hidden, weight, bias, labels, grad


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
def test_value_and_ordinary_gradients_are_those_of_the_plain_formula(dtype, tolerance, options):
    hidden, weight, bias, labels, grad = _data(dtype)
    ours = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    plain = _plain(hidden, weight, labels, bias, options)
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    pairs = zip(
        torch.autograd.grad(ours, (hidden, weight, bias), grad),
        torch.autograd.grad(plain, (hidden, weight, bias), grad),
        strict=True,
    )
    for got, want in pairs:
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


def test_autocast_takes_its_dtype_and_keeps_losses_in_32_bits():
    hidden, weight, bias, labels, _ = _data(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert losses.dtype == torch.float32
    narrow = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, bias=bias)
    torch.testing.assert_close(losses, narrow, rtol=0, atol=0)
    assert torch.autograd.grad(losses.sum(), weight)[0].dtype == torch.float32


@pytest.mark.parametrize("label", [150, -1])
def test_label_outside_the_vocabulary_is_refused(label):
    hidden, weight, _, labels, _ = _data(torch.float32)
    labels[1, 1] = label
    with pytest.raises(DataError, match=f"a label is {label}; the head has 150 entries"):
        linear_cross_entropy(hidden, weight, labels)


# Factors


class _Opposed(nn.Module):
    """A head on hidden states that are given, whose losses are weighted by numbers that are given."""

    def __init__(self, *, bias):
        super().__init__()
        self.head = nn.Linear(12, 70, bias=bias)

    def forward(self, x, labels, shares):
        return (linear_cross_entropy(x, self.head.weight, labels, bias=self.head.bias) * shares).sum(1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rest", [0.0, 1e-7, 1e-6, 1e-4, 1e-2])
def test_positions_that_oppose_each_other_keep_the_bound(rest, bias, gram, strategy, monkeypatch):
    monkeypatch.setattr(head, "prefers_gram", lambda *sizes: gram)
    torch.manual_seed(3)
    x = 5 * torch.randn(3, 40, 12)
    x[0] = x[0, :1] + rest * torch.randn(40, 12)
    labels, shares = torch.randint(70, (3, 40)), torch.randn(3, 40)
    labels[0], shares[0, 1::2] = 5, -shares[0, ::2]
    model, bound = _Opposed(bias=bias), 1e-4
    for samples in ([0], [0, 1, 2], [1, 2]):
        model.zero_grad()
        with GhostClipper(model, max_grad_norm=bound, strategy=strategy, probe=False) as clipper:
            clipper.backward(model(x[samples], labels[samples], shares[samples]))
        total = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        if samples == [0]:
            assert total.norm() <= bound * (1 + tolerances.SENSITIVITY[torch.float32])
        elif len(samples) == 3:
            whole = total
    assert (whole - total).norm() <= bound * (1 + tolerances.SENSITIVITY_OF_DIFFERENCE[torch.float32])


def test_weight_that_changes_between_norm_and_sum_is_refused():
    model, ids = Model(), torch.randint(23, (4, 5))
    model.embedding.weight.register_hook(lambda grad: None)

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.no_grad():
                model.head.weight.mul_(1.5)
            return grad

    whole = model.hidden
    model.hidden = lambda ids: whole(ids) + Changes.apply(model.mix(model.embedding(ids)))
    with (
        GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping", probe=False) as clipper,
        pytest.raises(TamperedGradientError, match="vocabulary head"),
    ):
        clipper.backward(model(ids, ids).mean(1))


# What it costs


class _Small(TorchDispatchMode):
    """Fails where a tensor of so many elements is made."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and 0 not in item.stride():
                self.largest = max(self.largest, item.numel())
                assert item.numel() < self.limit, f"{func}: {tuple(item.shape)}"
        return result


class FusedGPT(GPT):
    """A GPT that returns the mean loss of each sample."""

    def forward(self, ids_BT, labels_BT):
        """Map ids and labels (B, T) to losses (B,)."""
        places_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        x_BTI = self.token(ids_BT) + self.position(places_BT)
        for block in self.blocks:
            x_BTI = block(x_BTI)
        return linear_cross_entropy(self.final_norm(x_BTI), self.head.weight, labels_BT).mean(1)


def _gpt(*, tied, vocabulary=9000, positions=64):
    torch.manual_seed(0)
    model = FusedGPT(vocabulary=vocabulary, width=32, heads=2, layers=1, positions=positions)
    if tied:
        model.head.weight = model.token.weight
    return model


@pytest.mark.parametrize(("strategy", "tied"), [("bookkeeping", True), ("ghost", False), ("fast", True)])
def test_no_tensor_as_large_as_the_logits_is_ever_made(strategy, tied, monkeypatch):
    """Of the first step, with its proofs, and of the next: not even those of one sample."""
    monkeypatch.setattr(head, "TILE", 1 << 16)
    model = _gpt(tied=tied)
    ids = torch.randint(9000, (8, 64))
    with GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper, _Small(9000 * 64) as seen:
        for _ in range(2):
            clipper.backward(model(ids, ids.roll(-1, 1)))
    # The largest are gradients of parameters.
    assert seen.largest == 9000 * 32
