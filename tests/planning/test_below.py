"""A memory budget below 1 is kept, changes no sum, and says what it costs."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.flops import counter
from benchmarks.models import GPT, Block
from ghostclip import GhostClipper
from tests.cases import by_name
from tests.cases.table import CPU
from tests.exactness.runs import check_norms, check_sensitivity, check_sum, expected, run
from tests.live import peak_of
from tests.reference import clip_and_sum, per_sample_gradients

SAMPLES, TOKENS, VOCABULARY = 4, 6, 11


class _Tied(nn.Module):
    """Blocks with dropout under an embedding that is the head as well."""

    def __init__(self, *, dropout=0.0, layers=3):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, 8), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width=8, heads=2) for _ in range(layers))
        # Its gradient arrives at a node that leads to nothing else.
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, ids_BT):
        x_BTI = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTI = self.dropout(block(x_BTI))
        return functional.linear(x_BTI * self.scale, self.embedding.weight)


def _ids(samples=SAMPLES):
    return torch.randint(VOCABULARY, (samples, TOKENS), generator=torch.Generator().manual_seed(1))


def _losses(model, ids_BT):
    return functional.cross_entropy(model(ids_BT).transpose(1, 2), ids_BT.roll(-1, 1), reduction="none").mean(1)


def _model(make, dtype=torch.float64):
    torch.manual_seed(0)
    return make().to(dtype)


def _sums(model, ids, bound=0.5, **options):
    model.zero_grad(set_to_none=True)
    with GhostClipper(model, max_grad_norm=bound, **options) as clipper:
        for _ in range(3):
            clipper.reset()
            model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            clipper.backward(_losses(model, ids))
        reduction, coverage = clipper._reducer.latest if clipper._reducer else None, clipper.coverage()
    return [parameter.grad for parameter in model.parameters()], reduction, coverage


def _gpt(layers=3):
    return GPT(vocabulary=VOCABULARY, width=8, heads=2, layers=layers, positions=TOKENS)


@pytest.mark.parametrize("make", [_gpt, _Tied, lambda: _Tied(dropout=0.3)], ids=["untied", "tied", "dropout"])
@pytest.mark.parametrize("budget", [0.7, 0.01])
def test_sums_are_those_of_an_ordinary_budget(make, budget):
    wanted, *_ = _sums(_model(make), _ids())
    found, reduction, _ = _sums(_model(make), _ids(), memory_budget=budget)
    assert reduction.blocks
    assert budget > 0.01 or reduction.cut is not None
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("make", [_gpt, _Tied], ids=["untied", "tied"])
def test_sums_are_those_of_one_sample_at_a_time(make):
    model, ids = _model(make), _ids()
    found, reduction, _ = _sums(model, ids, memory_budget=0.01)
    assert reduction.cut is not None
    losses = lambda model, batch: _losses(model, batch["ids_BT"])  # noqa: E731
    rows = per_sample_gradients(model, {"ids_BT": ids}, losses, axes={"ids_BT": 0})
    torch.testing.assert_close(
        dict(zip([name for name, _ in model.named_parameters()], found, strict=True)),
        clip_and_sum(rows, max_grad_norm=0.5).clipped,
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", ["hf_llama_tied", "hf_t5", "encoder_in_eval_mode"])
def test_cases_of_the_table_are_exact(name):
    case = by_name(name).on(CPU)

    def make(model, bound):
        return GhostClipper(model, max_grad_norm=bound, memory_budget=0.01, batch_first=case.batch_first)

    outcome = run(case, make, torch.float32)
    check_sum(outcome, expected(name, CPU), torch.float32)
    check_norms(outcome, expected(name, CPU), torch.float32)
    check_sensitivity(case, make, torch.float32, samples=2)


@pytest.mark.parametrize("budget", [0.8, 0.01])
def test_one_sample_moves_the_sum_by_at_most_the_bound(budget):
    model, ids, bound = _model(_Tied, torch.float32), _ids(), 1e-2
    whole, *_ = _sums(model, ids, bound, memory_budget=budget)
    for sample in range(SAMPLES):
        rest, *_ = _sums(model, ids[[one for one in range(SAMPLES) if one != sample]], bound, memory_budget=budget)
        moved = torch.cat([(one - other).flatten() for one, other in zip(whole, rest, strict=True)]).norm()
        assert moved <= bound * (1 + 1e-5)


@pytest.mark.parametrize(("budget", "operations"), [(0.8, 1.25), (0.6, 1.6)])
def test_budget_is_kept_and_its_price_is_bounded(budget, operations):
    torch.manual_seed(0)
    model, ids = GPT(vocabulary=500, width=64, heads=4, layers=4, positions=64), torch.randint(500, (8, 64))
    beside = [*model.parameters(), ids]

    def ordinary():
        model.zero_grad(set_to_none=True)
        _losses(model, ids).mean().backward()

    def private():
        model.zero_grad(set_to_none=True)
        clipper.backward(_losses(model, ids))

    ordinary()
    base = peak_of(ordinary, beside=beside)
    with counter() as counted:
        ordinary()
    with GhostClipper(model, max_grad_norm=1.0, memory_budget=budget) as clipper:
        # In the first of them the model is proved and planned for.
        assert max(peak_of(private, beside=beside) for _ in range(4)) <= 1.05 * budget * base
        share = peak_of(private, beside=beside) / base
        assert share <= 1.05 * budget
        assert clipper.coverage().expected_share == pytest.approx(share, rel=0.1)
        with counter() as counted_privately:
            private()
    assert counted_privately.get_total_flops() <= operations * counted.get_total_flops()


class _InPlace(nn.Module):
    """Changes in place what its graph has saved, which running it again does not."""

    def __init__(self, *, in_place):
        super().__init__()
        self.layer, self.scale, self.in_place = nn.Linear(4, 4), nn.Parameter(torch.linspace(1, 2, 4)), in_place

    def forward(self, x_BTI):
        raised_BTI = self.layer(x_BTI).tanh() * 2
        scaled_BTI = raised_BTI * self.scale
        return scaled_BTI + (raised_BTI.add_(1) if self.in_place else raised_BTI + 1)


def test_what_a_block_changes_in_place_is_not_read_from_what_is_held():
    x, found = torch.randn(3, 5, 4, dtype=torch.float64), []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(_InPlace(in_place=in_place) for _ in range(3))).double()
        with GhostClipper(model, max_grad_norm=0.5, memory_budget=0.9) as clipper:
            clipper.backward(model(x).square().mean((1, 2)))
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_the_coverage_says_what_was_bought():
    model, ids = _model(_gpt), _ids()
    _, reduction, coverage = _sums(model, ids, memory_budget=0.01)
    rows = {row.name: row for row in coverage}
    assert coverage.memory_ratio == reduction.share
    assert rows["blocks.0.mlp_in.weight"].plan.endswith(", block run again, two backwards")
    assert rows["token.weight"].plan.endswith(", two backwards")
    assert "again" not in rows["head.weight"].plan
    _, _, ordinary = _sums(model, ids)
    assert coverage.total.base == ordinary.total.base
    assert coverage.total.private > ordinary.total.private


class _Skips(nn.Module):
    """What the blocks begin with goes past them as well, so that no block's output has all that goes on."""

    def __init__(self):
        super().__init__()
        self.past = True
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(width=8, heads=2) for _ in range(3))

    def forward(self, x_BTI):
        skipped = x_BTI = self.first(x_BTI)
        for block in self.blocks:
            x_BTI = block(x_BTI)
        return x_BTI + skipped if self.past else x_BTI


def test_a_backward_is_not_interrupted_where_something_leads_past():
    wanted, found = [], []
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    for budget, grads in ((1.0, wanted), (0.01, found)):
        model = _model(_Skips)
        with GhostClipper(model, max_grad_norm=0.5, memory_budget=budget) as clipper:
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                clipper.backward(model(x).square().mean((1, 2)))
            if budget < 1:
                assert clipper._reducer.latest.cut is None
        grads += [parameter.grad for parameter in model.parameters()]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_a_graph_of_another_form_than_the_one_looked_at_is_not_interrupted():
    """The model reads the first block's output past the others from the third step on."""
    x, found, wanted = torch.randn(3, 5, 4, dtype=torch.float64), [], []
    for budget, grads in ((1.0, wanted), (0.01, found)):
        model = _model(_Skips)
        with GhostClipper(model, max_grad_norm=0.5, memory_budget=budget) as clipper:
            for step in range(4):
                model.past = step > 2
                model.zero_grad(set_to_none=True)
                clipper.backward(model(x).square().mean((1, 2)))
                assert budget == 1.0 or bool(clipper._reducer.dropped) == (step < 3)
        grads += [parameter.grad for parameter in model.parameters()]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=8, heads=2) for _ in range(2))

    def forward(self, x_BTI):
        for block in self.blocks:
            x_BTI = checkpoint(block, x_BTI, use_reentrant=False)
        return x_BTI


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 8), _Checkpointed], ids=["no_blocks", "checkpointed"])
def test_what_cannot_be_brought_down_is_said(make, caplog):
    with GhostClipper(make(), max_grad_norm=1.0, memory_budget=0.7) as clipper:
        with caplog.at_level(logging.WARNING, "ghostclip"):
            clipper.backward(clipper.model(torch.randn(3, 5, 8)).square().mean((1, 2)))
    assert "memory_budget=0.7: the model shows no repeated blocks" in caplog.text


def test_a_plain_backward_says_that_it_keeps_everything(caplog):
    model, ids = _model(_gpt), _ids()
    wanted, *_ = _sums(_model(_gpt), ids, memory_budget=1.0)
    with GhostClipper(model, max_grad_norm=0.5, memory_budget=0.7):
        with caplog.at_level(logging.WARNING, "ghostclip"):
            _losses(model, ids).mean().backward()
    assert "loss.backward() is one backward" in caplog.text
    for parameter, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-10, atol=1e-13)
