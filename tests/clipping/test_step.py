"""One step from the user's side: how the loss is handed over, accumulation, and what happens between steps."""

import pytest
import torch

from ghostclip.errors import GhostClipError
from tests.cases import CORE_CASES, by_name
from tests.exactness.runs import Outcome, backward, check_norms, check_sum, engine, expected, gradients
from tests.reference import clip_and_sum, per_sample_gradients, take, trainable

F64 = torch.float64
core = pytest.mark.parametrize("case", CORE_CASES, ids=lambda case: case.name)


def _ready(case, strategy, dtype=F64, loss_reduction="mean"):
    model, batch = case.model(dtype), case.data(dtype)
    clipper = engine(strategy, loss_reduction=loss_reduction)(model, expected(case.name).max_grad_norm)
    return model, batch, clipper


def _outcome(model, clipper):
    return Outcome(
        gradients(model), clipper.per_sample_norms.double(), clipper.clip_coefficients.double(), clipper.batch_size
    )


def _check(case, model, clipper):
    check_sum(_outcome(model, clipper), expected(case.name), F64)
    check_norms(_outcome(model, clipper), expected(case.name), F64)


@core
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scalar_loss_of_declared_reduction(case, reduction):
    model, batch, clipper = _ready(case, "bookkeeping", loss_reduction=reduction)
    clipper.backward(getattr(case.losses(model, batch), reduction)())
    _check(case, model, clipper)


@core
@pytest.mark.parametrize("strategy", ["auto", "bookkeeping", "hooks"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_plain_backward(case, strategy, reduction):
    model, batch, clipper = _ready(case, strategy, loss_reduction=reduction)
    getattr(case.losses(model, batch), reduction)().backward()
    _check(case, model, clipper)


@core
def test_per_sample_losses_do_not_depend_on_declared_reduction(case, strategy):
    model, batch, clipper = _ready(case, strategy, loss_reduction="sum")
    clipper.backward(case.losses(model, batch))
    _check(case, model, clipper)


@core
def test_adds_to_an_existing_gradient(case, strategy):
    model, batch, clipper = _ready(case, strategy)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    outcome = backward(case, model, clipper, batch, F64)
    check_sum(outcome, expected(case.name), F64)


@core
def test_two_backwards_accumulate(case, strategy):
    model, batch, clipper = _ready(case, strategy)
    size = len(expected(case.name).norms_B)
    for part in (range(1), range(1, size)):
        clipper.backward(case.losses(model, take(batch, part, case.axes)))
    outcome = _outcome(model, clipper)
    check_sum(outcome, expected(case.name), F64)
    assert outcome.batch_size == size - 1


@core
def test_earlier_steps_forwards_and_metrics_leave_nothing(case, strategy):
    model, batch, clipper = _ready(case, strategy)
    clipper.backward(case.losses(model, take(batch, [0], case.axes)))
    model.zero_grad(set_to_none=True)
    case.losses(model, take(batch, [0, 1], case.axes))
    losses = case.losses(model, batch)
    with torch.no_grad():
        case.losses(model, take(batch, [0], case.axes))
    clipper.backward(losses)
    _check(case, model, clipper)


def test_evaluation_passes_change_nothing(strategy):
    case = by_name("linear_3d")
    model, batch, clipper = _ready(case, strategy)
    plain = case.model(F64).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch["x"]), plain(batch["x"]))
    model.train()
    clipper.backward(case.losses(model, batch))
    _check(case, model, clipper)


class _FailsOnRequest(torch.nn.Module):
    fail = False

    def forward(self, x):
        if self.fail:
            raise RuntimeError("the middle of a forward")
        return x


def test_exception_in_forward_leaves_nothing(strategy):
    case = by_name("linear_3d")
    model, batch, trap = case.model(F64), case.data(F64), _FailsOnRequest()
    model.insert(2, trap)
    # Keys move by the inserted module; parameters keep their order.
    clipper = engine(strategy)(model, expected(case.name).max_grad_norm)
    trap.fail = True
    with pytest.raises(RuntimeError, match="middle of a forward"):
        model(batch["x"])
    trap.fail = False
    clipper.backward(case.losses(model, batch))
    got = list(gradients(model).values())
    want = list(expected(case.name).clipped.values())
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_bound_can_be_changed_between_steps(strategy):
    case = by_name("linear_3d")
    model, batch, clipper = _ready(case, strategy)
    clipper.backward(case.losses(model, batch))
    model.zero_grad(set_to_none=True)
    clipper.max_grad_norm = 0.5 * clipper.max_grad_norm
    outcome = backward(case, model, clipper, batch, F64)
    halved = clip_and_sum(expected(case.name).per_sample, clipper.max_grad_norm)
    check_sum(outcome, halved, F64)
    check_norms(outcome, halved, F64)


def test_frozen_and_unfrozen_between_steps(strategy):
    """A parameter unfrozen after attaching is clipped with the rest, or refused; never trained unclipped."""
    case = by_name("linear_3d")
    model, batch = case.model(F64), case.data(F64)
    model[0].requires_grad_(False)
    clipper = engine(strategy)(model, expected(case.name).max_grad_norm)
    clipper.backward(case.losses(model, batch))
    model.zero_grad(set_to_none=True)
    model[0].requires_grad_(True)
    try:
        outcome = backward(case, model, clipper, batch, F64)
    except GhostClipError:
        assert all(p.grad is None for p in model.parameters())
        return
    check_sum(outcome, expected(case.name), F64)
    check_norms(outcome, expected(case.name), F64)


def test_layer_used_before_and_not_now_contributes_nothing(strategy):
    case = by_name("linear_3d")
    model, batch = case.model(F64), case.data(F64)

    def without_head(part):
        return (model[0](part["x"]) ** 2).mean((1, 2)) * part["weight"]

    per_sample = per_sample_gradients(model, batch, lambda _, part: without_head(part), axes={})
    clipper = engine(strategy)(model, expected(case.name).max_grad_norm)
    clipper.backward(case.losses(model, batch))
    model.zero_grad(set_to_none=True)
    clipper.backward(without_head(batch))
    want = clip_and_sum(per_sample, clipper.max_grad_norm)
    check_sum(_outcome(model, clipper), want, F64)
    check_norms(_outcome(model, clipper), want, F64)


@core
def test_hooks_strategy_shows_per_sample_gradients(case):
    model, batch, clipper = _ready(case, "hooks")
    clipper.backward(case.losses(model, batch))
    for name, p in trainable(model).items():
        want = torch.stack([gradient[name] for gradient in expected(case.name).per_sample])
        torch.testing.assert_close(p.grad_sample, want, rtol=1e-9, atol=1e-11)


@core
def test_empty_batch_contributes_nothing(case, strategy):
    model, batch, clipper = _ready(case, strategy)
    clipper.backward(case.losses(model, take(batch, [], case.axes)))
    assert all(not grad.any() for grad in gradients(model).values())
    clipper.backward(case.losses(model, batch))
    _check(case, model, clipper)
