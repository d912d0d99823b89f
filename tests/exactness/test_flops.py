"""Operations of a private step, counted exactly: the price of privacy cannot creep up unseen."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.flops import counter
from benchmarks.models import GPT
from ghostclip import GhostClipper
from tests.cases import CORE_CASES
from tests.exactness.runs import engine, expected
from tests.randomised import given, settings, st

# Operations over those of a non-private step (54.38 GFLOP).
LIMITS = {"bookkeeping": 1.11, "ghost": 1.45, "fast": 1.68, "hooks": 1.01}
SAMPLES, TOKENS, VOCABULARY = 16, 128, 5000


def _losses(model, ids_BT):
    """Per-sample cross entropy of the next token `[B]`."""
    logits_BVT = model(ids_BT).transpose(1, 2)
    targets_BT = ids_BT.roll(-1, 1)
    return functional.cross_entropy(logits_BVT, targets_BT, reduction="none").mean(1)


def _count(step):
    """Count every product, also those that torch's own counter passes over (`addmm_` and the like)."""
    with counter() as counted:
        step()
    return counted.get_total_flops()


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, positions=TOKENS), torch.randint(VOCABULARY, (SAMPLES, TOKENS))


@pytest.fixture(scope="module")
def non_private(gpt):
    model, ids = gpt
    return _count(lambda: _losses(model, ids).mean().backward())


def test_non_private_step_is_the_one_the_limits_are_for(non_private):
    assert non_private / 1e9 == pytest.approx(54.38, abs=0.01)


@pytest.mark.parametrize("strategy", LIMITS)
def test_private_step(gpt, non_private, strategy):
    model, ids = gpt
    clipper = engine(strategy)(model, 1.0)
    try:
        # Whatever an engine finds out about a model in its first step is paid once, so the second is counted.
        clipper.backward(_losses(model, ids[:2]))
        model.zero_grad(set_to_none=True)
        ratio = _count(lambda: clipper.backward(_losses(model, ids))) / non_private
    finally:
        clipper.remove()
        model.zero_grad(set_to_none=True)
    assert ratio <= LIMITS[strategy], f"{ratio:.3f} times a non-private step"


@pytest.mark.parametrize(("tokens", "samples"), [(512, 4), (1024, 2)])
def test_long_sequences_cost_what_ordinary_training_costs(tokens, samples):
    """A per-sample gradient is the smaller form there; Opacus ghost takes 2.86 and 4.05 times, measured."""
    torch.manual_seed(0)
    model, ids = GPT(vocabulary=VOCABULARY, positions=tokens), torch.randint(VOCABULARY, (samples, tokens))
    ordinary = _count(lambda: _losses(model, ids).mean().backward())
    model.zero_grad(set_to_none=True)
    with GhostClipper(model, max_grad_norm=1.0, probe=False) as clipper:
        assert _count(lambda: clipper.backward(_losses(model, ids))) <= 1.06 * ordinary


def _weight_gradients_built(model, step):
    """Return the names of the parameters whose gradient autograd itself computes during `step`."""
    built = set()
    handles = [p.register_hook(lambda _, name=name: built.add(name)) for name, p in model.named_parameters()]
    step()
    for handle in handles:
        handle.remove()
    return built


@pytest.mark.parametrize("case", CORE_CASES, ids=lambda case: case.name)
def test_autograd_builds_no_weight_gradient_in_bookkeeping(case):
    model, batch = case.model(torch.float64), case.data(torch.float64)
    assert _weight_gradients_built(model, lambda: case.losses(model, batch).sum().backward()) == {
        name for name, _ in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    clipper = engine("bookkeeping")(model, expected(case.name).max_grad_norm)
    assert _weight_gradients_built(model, lambda: clipper.backward(case.losses(model, batch))) == set()


def test_bookkeeping_runs_each_product_of_a_layer_once():
    """Forward, input gradient and clipped sum are three products; a layer whose input needs no gradient has two."""
    samples, tokens, width, out = 4, 3, 64, 48
    model = nn.Linear(width, out)
    clipper = engine("bookkeeping")(model, 1.0)
    x = torch.randn(samples, tokens, width)
    clipper.backward(model(x).square().mean((1, 2)))
    counted = _count(lambda: clipper.backward(model(x).square().mean((1, 2))))
    product = 2 * samples * tokens * width * out
    gram = 2 * samples * tokens * tokens * (width + out)
    bias = 2 * samples * out
    assert counted <= 2 * product + gram + bias


@settings(max_examples=25, deadline=None)
@given(*(st.integers(1, 40) for _ in range(4)))
def test_a_linear_layer_costs_at_most_seven_sixths_and_what_blocks_waste(samples, tokens, width, out):
    """At any shape, counted; the sums of kept gradients come on top, and nothing is bought with memory."""
    model = nn.Linear(width, out, bias=False)
    x = torch.randn(samples, tokens, width, requires_grad=True)
    with GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping") as clipper:
        clipper.planner._plan = lambda *_: frozenset()
        clipper.backward(model(x).square().sum((1, 2)))
        counted = _count(lambda: clipper.backward(model(x).square().sum((1, 2))))
        held = sum(row.cost.held for row in clipper.coverage())
    ordinary = 6 * samples * tokens * width * out
    kept = 2 * samples * width * out if tokens > 1 and width * out <= tokens * (width + out) else 0
    assert counted <= 1.21 * ordinary + kept
    assert held <= 4 * samples * tokens * (width + out)
