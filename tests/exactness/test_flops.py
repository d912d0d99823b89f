"""Operations of a private step, counted exactly: the price of privacy cannot creep up unseen."""

import pytest
import torch
from torch.nn import functional

from benchmarks.flops import counter
from benchmarks.models import GPT
from ghostclip import GhostClipper
from tests.exactness.runs import engine

# Operations over those of a non-private step.
LIMITS = {"bookkeeping": 1.11, "ghost": 1.45, "fast": 1.68, "hooks": 1.01}
SAMPLES, TOKENS, VOCABULARY = 4, 128, 5000


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


def test_long_sequences_cost_what_ordinary_training_costs():
    """A per-sample gradient is the smaller form there; Opacus ghost takes 2.86 times, measured."""
    torch.manual_seed(0)
    tokens, samples = 512, 2
    model, ids = GPT(vocabulary=VOCABULARY, positions=tokens), torch.randint(VOCABULARY, (samples, tokens))
    ordinary = _count(lambda: _losses(model, ids).mean().backward())
    model.zero_grad(set_to_none=True)
    with GhostClipper(model, max_grad_norm=1.0, probe=False) as clipper:
        assert _count(lambda: clipper.backward(_losses(model, ids))) <= 1.06 * ordinary
