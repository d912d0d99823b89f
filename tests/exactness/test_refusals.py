"""What cannot be clipped per sample is refused by name, before anything is trained."""

import pytest
import torch
from torch import nn

from ghostclip.errors import GhostClipError, LossReductionError, SampleMixingError, UnsupportedModelError
from tests.cases import by_name
from tests.exactness.runs import engine, expected, gradients

F64 = torch.float64


def _ready(strategy, name="linear_3d", loss_reduction="mean"):
    case = by_name(name)
    model = case.model(F64)
    clipper = engine(strategy, loss_reduction=loss_reduction)(model, expected(name).max_grad_norm)
    return case, model, case.data(F64), clipper


def _attach_and_step(strategy, model, x):
    """Refused when attached, in forward or in backward: any of them is before the first step."""
    clipper = engine(strategy)(model, 1.0)
    clipper.backward(model(x).square().flatten(1).mean(1))


def _nothing_trained(model):
    return all(p.grad is None for p in model.parameters())


def test_losses_of_another_shape(strategy):
    """Shape [B, 1] is refused or exact, never broadcast."""
    case, model, batch, clipper = _ready(strategy)
    with pytest.raises(LossReductionError, match=r"\(?4, ?1\)?"):
        clipper.backward(case.losses(model, batch)[:, None])
    with pytest.raises(GhostClipError):
        clipper.backward(case.losses(model, batch)[:2])
    assert _nothing_trained(model)


def test_loss_summed_though_declared_mean_is_clipped_as_its_graph_shows(strategy):
    """A sum whose terms are weighted by a half: a reduction that is believed would change every norm by B."""
    case, model, batch, clipper = _ready(strategy)
    clipper.backward(case.losses(model, batch).sum())
    torch.testing.assert_close(gradients(model), expected(case.name).clipped, rtol=1e-9, atol=1e-12)


def test_loss_averaged_but_declared_sum(strategy):
    case, model, batch, clipper = _ready(strategy, loss_reduction="sum")
    with pytest.raises(LossReductionError, match="sum"):
        clipper.backward(case.losses(model, batch).mean())
    assert _nothing_trained(model)


@pytest.mark.parametrize("strategy", ["ghost", "fast"])
def test_plain_backward_where_two_passes_are_needed(strategy):
    """A plain backward cannot be reweighted, so it is refused, or the engine does it some other exact way."""
    case, model, batch, _ = _ready(strategy)
    losses = case.losses(model, batch)
    try:
        losses.mean().backward()
    except GhostClipError:
        assert _nothing_trained(model)
        return
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected("linear_3d").clipped[name])


@pytest.mark.parametrize("shape", ["per_sample", "scalar"])
def test_penalty_on_parameters(strategy, shape):
    """An L2 penalty is no sample's loss: its gradient would be neither clipped nor noised."""
    case, model, batch, clipper = _ready(strategy)
    penalty = sum(p.square().sum() for p in model.parameters())
    losses = case.losses(model, batch)
    loss = losses + penalty if shape == "per_sample" else losses.mean() + penalty
    with pytest.raises(GhostClipError, match="step_pre_hook"):
        clipper.backward(loss)
    assert _nothing_trained(model)


@pytest.mark.parametrize("strategy", ["auto", "bookkeeping", "hooks"])
def test_penalty_on_parameters_with_plain_backward(strategy):
    case, model, batch, _ = _ready(strategy)
    penalty = sum(p.square().sum() for p in model.parameters())
    with pytest.raises(GhostClipError):
        (case.losses(model, batch).mean() + penalty).backward()
    assert _nothing_trained(model)


class _BatchNormOfItsOwn(nn.Module):
    """No module tells of the batch norm, whose statistics are there for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        statistics = torch.zeros(4), torch.ones(4)
        return nn.functional.batch_norm(x, *statistics, self.weight, self.bias, training=True)


@pytest.mark.parametrize("samples", [1, 4])
def test_batch_norm_as_a_function(samples):
    """Also of one sample, where no other could show that samples mix."""
    model = _BatchNormOfItsOwn()
    with pytest.raises(SampleMixingError, match="batch_norm: in training mode"):
        _attach_and_step("auto", model, torch.randn(samples, 4, 5))
    assert _nothing_trained(model)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "bookeeping"},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": float("nan")},
        {"loss_reduction": "none"},
        {"loss_reduction": "avg"},
    ],
    ids=str,
)
def test_wrong_options(options):
    import ghostclip

    with pytest.raises(GhostClipError, match=next(iter(options))):
        ghostclip.GhostClipper(nn.Linear(2, 2), **{"max_grad_norm": 1.0, **options})


def test_model_without_trainable_parameters(strategy):
    with pytest.raises(GhostClipError, match="trainable"):
        engine(strategy)(nn.Linear(2, 2).requires_grad_(False), 1.0)


def test_two_clippers_on_one_model(strategy):
    """Two would clip twice, or one would see what the other left."""
    _, model, _, clipper = _ready(strategy)
    with pytest.raises(GhostClipError):
        engine(strategy)(model, 1.0)
    clipper.remove()
    engine(strategy)(model, 1.0).remove()


@pytest.mark.parametrize("with_loss", [True, False])
def test_gradient_penalty(strategy, with_loss):
    """What a double backward adds to a parameter's gradient comes through the backward, where nothing is captured."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), torch.randn(3, 4, dtype=F64)
    clipper = engine(strategy)(model, 1.0)

    def step():
        inputs = x.clone().requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        clipper.backward((slope.norm(dim=1) - 1).square() + (out.square().sum(1) if with_loss else 0.0))

    with pytest.raises(GhostClipError, match="gradient penalty"):
        step()
    assert _nothing_trained(model)


class _RunsAgain(torch.autograd.Function):
    """Keeps no values for its backward, which runs the layer again: what solvers of differential equations do."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer = layer
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.layer(x), (x, *parameters), grad)


class _Adjoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return _RunsAgain.apply(self.layer, x, *self.layer.parameters())


class _InnerStep(nn.Module):
    """Takes a step on the batch in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        (slope,) = torch.autograd.grad(self.layer(x).square().sum(), inputs=self.layer.weight, create_graph=True)
        return self.layer(x) - x @ slope.T


class _PerSampleCalls(nn.Module):
    """Calls a layer inside ``torch.vmap``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return torch.vmap(self.layer)(x)


class _Complex(nn.Module):
    """Multiplies by a complex parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x):
        return (x * self.weight).abs()


def _with_norm(kind):
    return nn.Sequential(nn.Linear(5, 4), kind(4), nn.Linear(4, 2))


def _tracking():
    """Keeps sums over samples in a buffer that is neither clipped nor noised."""
    return nn.Sequential(nn.Conv1d(4, 4, 2), nn.InstanceNorm1d(4, affine=True, track_running_stats=True))


REFUSED = {
    "BatchNorm1d": (lambda: _with_norm(nn.BatchNorm1d), (4, 5)),
    "SyncBatchNorm": (lambda: _with_norm(nn.SyncBatchNorm), (4, 5)),
    "running": (_tracking, (4, 4, 5)),
    "scale_grad_by_freq": (lambda: nn.Embedding(7, 3, scale_grad_by_freq=True), None),
    r"layer.*torch\.vmap": (_PerSampleCalls, (4, 5)),
    "weight.*complex": (_Complex, (4, 5)),
    r"asks torch\.autograd\.grad for the gradient of parameter 'layer\.weight, layer\.bias'": (_Adjoint, (4, 5)),
    r"asks torch\.autograd\.grad for the gradient of parameter 'layer\.weight'": (_InnerStep, (4, 5)),
}


def test_layers_without_gradients_of_samples_are_named(strategy):
    for said, (make, shape) in REFUSED.items():
        model = make() if make is _Complex else make().double()
        x = torch.randint(7, (4, 5)) if shape is None else torch.randn(shape, dtype=F64)
        with pytest.raises(GhostClipError, match=said):
            _attach_and_step(strategy, model, x)
        assert _nothing_trained(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_part():
    model = nn.Sequential(torch.jit.script(nn.Linear(5, 4)), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match="0 is a scripted"):
        engine("auto")(model, 1.0)
