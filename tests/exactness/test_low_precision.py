"""16-bit models, autocast, cancellation and samples that are not finite: the bound holds in floating point."""

import pytest
import torch
from torch import nn

from ghostclip.clipping.norms import UNBOUNDED
from tests.cases import CORE_CASES, by_name
from tests.exactness import tolerances
from tests.exactness.runs import backward, check_norms, check_sum, engine, expected, gradients
from tests.reference import clip_and_sum, per_sample_gradients, take, trainable, whole_norm

BF16 = torch.bfloat16
core = pytest.mark.parametrize("case", CORE_CASES, ids=lambda case: case.name)


def _sum(clipper, model):
    """Return the clipped sum that the clipper keeps, in float32 at least whatever the dtype of the model."""
    kept = {name: clipper.summed_gradient(p) for name, p in trainable(model).items()}
    for name, value in kept.items():
        assert value is None or value.dtype in (torch.float32, torch.float64), f"{name}: summed in {value.dtype}"
    zero = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable(model).items()}
    return {name: zero[name] if value is None else value.double().clone() for name, value in kept.items()}


def _clipped(clipper, model, losses):
    clipper.reset()
    clipper.backward(losses)
    return _sum(clipper, model)


def _check_bound(case, model, batch, clipper, losses_of):
    """Hold each sample alone to the tight bound, and leaving it out to the one for differences."""
    size = len(expected(case.name).norms_B)
    bound = clipper.max_grad_norm
    whole = _clipped(clipper, model, losses_of(batch))
    for sample in range(size):
        alone = _clipped(clipper, model, losses_of(take(batch, [sample], case.axes)))
        assert whole_norm(alone).item() <= bound * (1 + tolerances.SENSITIVITY[BF16])
        others = [index for index in range(size) if index != sample]
        rest = _clipped(clipper, model, losses_of(take(batch, others, case.axes)))
        moved = whole_norm({name: whole[name] - rest[name] for name in whole}).item()
        assert moved <= bound * (1 + tolerances.SENSITIVITY_OF_DIFFERENCE[BF16])


@core
@pytest.mark.parametrize("clip_all", [False, True])
def test_bfloat16_model_keeps_the_bound(case, strategy, clip_all, device):
    case = case.on(device)
    model, batch = case.model(BF16), case.data(BF16)
    clipper = engine(strategy)(model, expected(case.name, device).max_grad_norm * (0.1 if clip_all else 1.0))
    clipper.own_gradients()
    assert clipper.max_grad_norm > 0
    _check_bound(case, model, batch, clipper, lambda part: case.losses(model, part))


@core
@pytest.mark.usefixtures("units")
def test_bfloat16_model_keeps_the_bound_on_matrix_units(case, strategy, device):
    test_bfloat16_model_keeps_the_bound(case, strategy, clip_all=True, device=device)


@core
def test_norms_of_bfloat16_factors_are_no_smaller_than_what_is_summed(case, strategy, device):
    """What one sample adds to the sum, unclipped, has the norm that its coefficient would be made of, or less."""
    case = case.on(device)
    model, batch = case.model(BF16), case.data(BF16)
    clipper = engine(strategy)(model, 1e6)
    clipper.own_gradients()
    for sample in range(len(expected(case.name, device).norms_B)):
        alone = _clipped(clipper, model, case.losses(model, take(batch, [sample], case.axes)))
        assert whole_norm(alone) <= clipper.per_sample_norms.double().item() * (1 + UNBOUNDED)


@core
@pytest.mark.usefixtures("units")
def test_norms_are_no_smaller_on_matrix_units(case, strategy, device):
    test_norms_of_bfloat16_factors_are_no_smaller_than_what_is_summed(case, strategy, device)


@core
@pytest.mark.parametrize("clip_all", [False, True])
def test_autocast_keeps_the_bound(case, strategy, clip_all, device):
    case = case.on(device)
    model, batch = case.model(torch.float32), case.data(torch.float32)
    clipper = engine(strategy)(model, expected(case.name, device).max_grad_norm * (0.1 if clip_all else 1.0))
    clipper.own_gradients()

    def losses(part):
        with torch.autocast(device.type, dtype=BF16):
            return case.losses(model, part)

    _check_bound(case, model, batch, clipper, losses)


@core
def test_norms_are_kept_in_float32(case, strategy, device):
    case = case.on(device)
    model, batch = case.model(BF16), case.data(BF16)
    clipper = engine(strategy)(model, 1.0)
    clipper.backward(case.losses(model, batch))
    assert clipper.per_sample_norms.dtype in (torch.float32, torch.float64)
    assert clipper.clip_coefficients.dtype in (torch.float32, torch.float64)
    plain = per_sample_gradients(case.model(BF16), batch, case.losses, axes=case.axes)
    # Plain autograd rounds its gradients to 8 bits; the two agree to that.
    assert clipper.per_sample_norms.tolist() == pytest.approx(clip_and_sum(plain).norms_B.tolist(), rel=2e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["linear_3d", "custom_vit", "inplace_residual", "shared_linear_twice"])
def test_sample_that_is_not_finite_contributes_nothing(name, bad, strategy, device):
    case = by_name(name).on(device)
    model, batch = case.model(torch.float64), case.data(torch.float64)
    size = len(expected(name, device).norms_B)
    bound = expected(name, device).max_grad_norm
    clean = clip_and_sum(per_sample_gradients(model, take(batch, range(1, size), {}), case.losses, axes={}), bound)
    batch["x"][0].view(-1)[0] = bad
    clipper = engine(strategy)(model, clean.max_grad_norm)
    outcome = backward(case, model, clipper, batch, torch.float64)
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())
    check_sum(outcome, clean, torch.float64)
    assert outcome.coef_B[0] == 0
    assert torch.isfinite(outcome.coef_B).all()


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["embedding_2d_ids", "shared_tied_head"])
def test_loss_that_is_not_finite_contributes_nothing(name, weight, strategy):
    case = by_name(name)
    model, batch = case.model(torch.float64), case.data(torch.float64)
    batch["weight"][1] = weight
    clipper = engine(strategy)(model, expected(name).max_grad_norm)
    outcome = backward(case, model, clipper, batch, torch.float64)
    finite = [gradient for sample, gradient in enumerate(expected(name).per_sample) if sample != 1]
    check_sum(outcome, clip_and_sum(finite, clipper.max_grad_norm), torch.float64)
    assert outcome.coef_B[1] == 0


class _Cancels(nn.Module):
    """The token gradients of a sample are large and sum to nearly nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 20, bias=False)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("rest", [0.0, 1e-7, 1e-6, 1e-4, 1e-2])
def test_cancelling_gradients_keep_the_bound(rest, strategy):
    """Sample 0 repeats one token with gradients +1 and -1 and a small rest, in float32."""
    torch.manual_seed(3)
    batch_size, tokens = 3, 8
    x = 30 * torch.randn(batch_size, tokens, 24)
    x[0] = x[0, :1] + rest * torch.randn(tokens, 24)
    g = 30 * torch.randn(batch_size, tokens, 20)
    g[0, 1::2] = -g[0, ::2]

    def losses(model, part):
        return (model(part["x"]) * part["g"]).sum((1, 2))

    model = _Cancels()
    double = per_sample_gradients(_as_double(model), {"x": x.double(), "g": g.double()}, losses, axes={})
    truth_B = clip_and_sum(double).norms_B
    # So that the sample that cancels is clipped, as far as it has a gradient at all.
    bound = max(0.5 * truth_B[0].item(), 1e-4)
    clipper = engine(strategy)(model, bound)
    clipper.backward(losses(model, {"x": x, "g": g}))
    assert clipper.per_sample_norms[0].item() >= truth_B[0].item() * (1 - 1e-4)
    model.zero_grad(set_to_none=True)
    clipper.backward(losses(model, {"x": x[:1], "g": g[:1]}))
    contribution = whole_norm(gradients(model)).item()
    assert contribution <= bound * (1 + tolerances.SENSITIVITY[torch.float32])


def _as_double(model):
    double = type(model)().double()
    double.load_state_dict(model.state_dict())
    return double


@core
def test_float32_matches_at_large_and_small_scales(case, strategy, device):
    case = case.on(device)
    """Losses 1e6 times larger or smaller neither overflow nor vanish."""
    for scale in (1e6, 1e-6):
        model, batch = case.model(torch.float32), case.data(torch.float32)
        batch["weight"] = batch["weight"] * scale
        clipper = engine(strategy)(model, expected(case.name, device).max_grad_norm * scale)
        outcome = backward(case, model, clipper, batch, torch.float32)
        per_sample = [
            {k: v * scale for k, v in gradient.items()} for gradient in expected(case.name, device).per_sample
        ]
        reference = clip_and_sum(per_sample, clipper.max_grad_norm)
        check_sum(outcome, reference, torch.float32)
        check_norms(outcome, reference, torch.float32)
