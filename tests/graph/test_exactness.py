"""Clipped sums of a graph against one sample at a time in float64, and how far one sample moves them."""

import pytest
import torch

import ghostclip
from tests.cases import by_name
from tests.cases.table import Case
from tests.exactness.runs import Outcome, check_norms, check_sum, expected, gradients
from tests.graph.steps import ATEN
from tests.reference import batch_size, take, whole_norm

# One of every form of sum over samples, and of what is done with sums afterwards.
QUICK = (
    "shared_tied_head",
    "conv2d_groups",
    "linear_folded_token_major",
    "conv_transposed2d_stride",
    "groupnorm_2d",
    "layernorm_4d",
    "embedding_padding",
    "picked_gather",
    "constant_arange",
    "weight_norm",
    "lstm_folded",
    "checkpoint_not_reentrant",
)


def _step(case: Case, model, bound, dtype):
    clipper = ghostclip.GhostClipper(model, max_grad_norm=bound, strategy="graph", batch_first=case.batch_first)
    step = ghostclip.GraphStep(clipper, case.losses, options=ATEN)
    step(case.data(dtype))
    assert step.graphs[0].verified, dict(step.reasons)
    clipper.reset()
    return step


def _run(case, model, step, batch, dtype) -> Outcome:
    model.zero_grad(set_to_none=True)
    step.clipper.reset()
    step(batch)
    clipper = step.clipper
    return Outcome(
        gradients(model), clipper.per_sample_norms.double(), clipper.clip_coefficients.double(), clipper.batch_size
    )


@pytest.mark.parametrize("name", QUICK)
def test_a_graph_is_exact(name):
    case = by_name(name)
    model, dtype = case.model(torch.float64), torch.float64
    want = expected(name)
    step = _step(case, model, want.max_grad_norm, dtype)
    outcome = _run(case, model, step, case.data(dtype), dtype)
    check_sum(outcome, want, dtype)
    check_norms(outcome, want, dtype)
    assert step.graphs[0].runs == 2
    assert not step.reasons


@pytest.mark.parametrize("name", QUICK[:3])
def test_one_sample_moves_the_sum_by_no_more_than_c(name):
    case, dtype = by_name(name), torch.float32
    model, batch, want = case.model(dtype), case.data(dtype), expected(name)
    bound = want.max_grad_norm
    step = _step(case, model, bound, dtype)
    whole = _run(case, model, step, batch, dtype).clipped
    size = batch_size(batch, case.axes)
    for sample in range(min(size, 3)):
        others = [index for index in range(size) if index != sample]
        rest = _run(case, model, step, take(batch, others, case.axes), dtype).clipped
        moved = whole_norm({name: whole[name] - rest[name] for name in whole}).item()
        assert moved <= bound * (1 + 1e-5)


@pytest.mark.slow
def test_every_case_is_exact_or_eager():
    from tests.cases import ALL_CASES

    wrong = {}
    for case in ALL_CASES:
        if case.refused or "random" in case.tags or torch.float64 not in case.dtypes or case.name.startswith("head"):
            continue
        model, want = case.model(torch.float64), expected(case.name)
        clipper = ghostclip.GhostClipper(
            model, max_grad_norm=want.max_grad_norm, strategy="graph", batch_first=case.batch_first
        )
        step = ghostclip.GraphStep(clipper, case.losses, options=ATEN)
        with case.numerics(torch.float64):
            step(case.data(torch.float64))
            outcome = _run(case, model, step, case.data(torch.float64), torch.float64)
        try:
            check_sum(outcome, want, torch.float64)
            check_norms(outcome, want, torch.float64)
        except AssertionError as error:
            wrong[case.name] = str(error)[:200]
    assert not wrong
