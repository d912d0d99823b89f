"""16-bit models, autocast, cancellation and samples that are not finite: the bound holds in floating point."""

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from tests.cases import CORE_CASES, by_name
from tests.exactness import tolerances
from tests.exactness.runs import backward, check_sum, engine, expected, gradients
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
    clipper.withhold_gradients()
    assert clipper.max_grad_norm > 0
    _check_bound(case, model, batch, clipper, lambda part: case.losses(model, part))


@core
@pytest.mark.usefixtures("units")
def test_bfloat16_model_keeps_the_bound_on_matrix_units(case, strategy, device):
    test_bfloat16_model_keeps_the_bound(case, strategy, clip_all=True, device=device)


@core
@pytest.mark.parametrize("clip_all", [False, True])
def test_autocast_keeps_the_bound(case, strategy, clip_all, device):
    case = case.on(device)
    model, batch = case.model(torch.float32), case.data(torch.float32)
    clipper = engine(strategy)(model, expected(case.name, device).max_grad_norm * (0.1 if clip_all else 1.0))
    clipper.withhold_gradients()

    def losses(part):
        with torch.autocast(device.type, dtype=BF16):
            return case.losses(model, part)

    _check_bound(case, model, batch, clipper, losses)


BACK = {
    "losses": lambda clipper, losses: clipper.backward(losses),
    "their mean": lambda clipper, losses: losses.mean().backward(),
    "their mean, given to the clipper": lambda clipper, losses: clipper.backward(losses.mean()),
    "their sum over B": lambda clipper, losses: (losses.sum() / len(losses)).backward(),
    "a graph that is retained": lambda clipper, losses: (
        (mean := losses.mean()).backward(retain_graph=True),
        clipper.discard(),
        mean.backward(),
    ),
    "their sum": lambda clipper, losses: losses.sum().backward(),
}


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "hooks"])
@pytest.mark.parametrize("how", BACK)
def test_equal_samples_under_autocast_add_the_same_whatever_their_number(how, strategy):
    """A mean divides gradients by that number before they are rounded to 16 bits: docs/floating-point.md, A3."""
    size, bound, sums = 512, 0.5, []
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(1, 16)
    reduction = "sum" if how == "their sum" else "mean"
    clipper = GhostClipper(model, max_grad_norm=bound, loss_reduction=reduction, strategy=strategy)
    for count in (size, size - 1):
        with torch.autocast("cpu", dtype=BF16):
            output = model(x.expand(count, 16).clone())
        losses = nn.functional.cross_entropy(output.float(), torch.zeros(count).long(), reduction="none")
        clipper.reset()
        BACK[how](clipper, losses)
        sums.append(_sum(clipper, model))
    assert whole_norm({name: sums[0][name] - sums[1][name] for name in sums[0]}).item() <= bound * (1 + 1e-5)
    assert whole_norm(sums[0]).item() >= 0.99 * size * bound


@pytest.mark.integration
def test_so_they_do_in_fabric_whose_hook_on_outputs_looks_at_no_gradient():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    size, bound, sums = 256, 0.5, []
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(1, 16)
    with GhostClipper(model, max_grad_norm=bound) as clipper:
        for count in (size, size - 1):
            output = fabric.setup_module(model)(x.expand(count, 16).clone())
            fabric.backward(nn.functional.cross_entropy(output, torch.zeros(count).long()))
            sums.append(_sum(clipper, model))
            clipper.reset()
    assert whole_norm({name: sums[0][name] - sums[1][name] for name in sums[0]}).item() <= bound * (1 + 1e-5)
    assert whole_norm(sums[0]).item() >= 0.99 * size * bound


class _Elsewhere:
    """Gradients of a loss that are not the private model's."""

    def __init__(self, what):
        torch.manual_seed(0)
        self.x = torch.randn(6, 4, requires_grad=what == "inputs")
        self.shift = torch.zeros(3, requires_grad=what == "a tensor")
        self.others = {"inputs": [self.x], "a tensor": [self.shift], "hooks": []}[what]
        self.what, self.seen = what, []

    def back(self, model, reduce):
        with torch.autocast("cpu", dtype=BF16):
            output = model(self.x) + self.shift
        if self.what == "hooks":
            output.register_hook(lambda grad: self.seen.append(grad.float().abs().max().item()))
        reduce(output.float().square().sum(1)).backward()
        return [one.grad.clone() for one in self.others] or [torch.tensor(self.seen)]


@pytest.mark.parametrize("what", ["inputs", "a tensor", "hooks"])
def test_gradients_that_go_elsewhere_under_autocast_are_ordinary_ones(what):
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    (due,) = _Elsewhere(what).back(model, torch.mean)
    with GhostClipper(model, max_grad_norm=1e-3) as clipper:
        (found,) = _Elsewhere(what).back(clipper.model, torch.mean)
    assert torch.equal(found, due)


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
