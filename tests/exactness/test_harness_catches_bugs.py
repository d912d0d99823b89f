"""The checks themselves: a right clipper passes every case, a wrong one fails.

Whoever loosens a check sees a test fail here.
"""

import functools

import pytest
import torch

from tests.cases import ALL_CASES, CORE_CASES, by_name
from tests.exactness.runs import check_norms, check_sensitivity, check_sum, expected, gradients, run
from tests.exactness.toy import FAULTS, ToyClipper

# Autograd refuses `autograd.grad` under reentrant checkpointing, which the toy is made of.
_CASES = [case for case in ALL_CASES if "reentrant" not in case.tags]
# Faults after which a single sample can move the sum by more than C.
_BREAK_THE_BOUND = (
    "unclipped",
    "clipped_per_parameter",
    "norm_bound_doubled",
    "sum_doubled",
    "parameter_not_in_norm",
    "no_cross_terms",
    "samples_swapped",
    "remembers_last_step",
)
# Faults that only a second step or an earlier gradient shows.
_NEED_A_SECOND_STEP = ("overwrites_gradient", "remembers_last_step")


def _with(fault):
    return functools.partial(ToyClipper, fault=fault)


def _cases_for(fault):
    shared = [case for case in CORE_CASES if "shared" in case.tags]
    return shared if fault == "no_cross_terms" else CORE_CASES


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_right_clipper_passes(case):
    for dtype in case.dtypes:
        outcome = run(case, ToyClipper, dtype)
        check_sum(outcome, expected(case.name), dtype)
        check_norms(outcome, expected(case.name), dtype)


@pytest.mark.parametrize("case", CORE_CASES, ids=lambda case: case.name)
def test_right_clipper_passes_sensitivity(case):
    check_sensitivity(case, ToyClipper, torch.float32)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in _NEED_A_SECOND_STEP])
def test_wrong_sum_is_seen_in_every_case(fault):
    for case in _cases_for(fault):
        outcome = run(case, _with(fault), torch.float64)
        with pytest.raises(AssertionError, match="relative error"):
            check_sum(outcome, expected(case.name), torch.float64)


@pytest.mark.parametrize("fault", ["parameter_not_in_norm", "no_cross_terms"])
def test_wrong_norm_is_seen_in_every_case(fault):
    for case in _cases_for(fault):
        outcome = run(case, _with(fault), torch.float64)
        with pytest.raises(AssertionError, match="not close"):
            check_norms(outcome, expected(case.name), torch.float64)


def _moves_too_far(case, fault):
    try:
        check_sensitivity(case, _with(fault), torch.float32)
    except AssertionError as error:
        return "moves the clipped sum" in str(error)
    return False


@pytest.mark.parametrize("fault", _BREAK_THE_BOUND)
def test_broken_bound_is_seen(fault):
    seen = [case.name for case in _cases_for(fault) if _moves_too_far(case, fault)]
    assert len(seen) >= (len(_cases_for(fault)) + 1) // 2


def test_overwritten_gradient_is_seen():
    case = by_name("linear_3d")
    model = case.model(torch.float64)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ToyClipper(model, 1.0, "overwrites_gradient").backward(case.losses(model, case.data(torch.float64)))
    assert all((grad - 1.0).abs().max() > 0.1 for grad in gradients(model).values())


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_case_clips_some_samples_and_leaves_others(case):
    reference = expected(case.name)
    assert torch.isfinite(reference.norms_B).all()
    assert (reference.coef_B < 0.99).any()
    assert len(reference.coef_B) == 1 or (reference.coef_B == 1).any()
