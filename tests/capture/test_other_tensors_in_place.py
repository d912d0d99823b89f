"""Forwards on other tensors than the parameters: what they learn would not reach the optimizer, so they are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import GhostClipError, UncoveredParameterError, UnsupportedModelError
from tests.reference import clip_and_sum, per_sample_gradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:noise_multiplier=0", "ignore:poisson_sampling=False", "ignore::FutureWarning"
)
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")


def _scaled(module):
    return {name: parameter * 1.5 for name, parameter in module.named_parameters()}


def _with_copies(module):
    return {name: nn.Parameter(parameter.detach().clone()) for name, parameter in module.named_parameters()}


def _exchanged(module, x):
    table = module[0]._parameters
    kept, table["weight"] = table["weight"], table["weight"] * 1.5
    try:
        return module(x)
    finally:
        table["weight"] = kept


WAYS = {
    "computed from the parameters": lambda m, x: functional_call(m, _scaled(m), (x,)),
    "one of them": lambda m, x: functional_call(m, {"0.weight": m[0].weight * 1.5}, (x,)),
    "copies with a gradient": lambda m, x: functional_call(
        m, {name: p.detach().clone().requires_grad_() for name, p in m.named_parameters()}, (x,)
    ),
    "the older name": lambda m, x: torch.nn.utils.stateless.functional_call(m, _scaled(m), (x,)),
    "an entry of the table": _exchanged,
}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _private(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=8)
    return ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        **options,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_in_the_place_of_a_parameter_is_refused(way, strategy):
    model = _model()
    with (
        ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy),
        pytest.raises(UncoveredParameterError, match=r"parameter '0\.weight': a tensor that is no parameter"),
    ):
        WAYS[way](model, torch.randn(5, 3))


def test_other_parameters_that_are_gone_again_are_refused_at_the_step():
    model = _model()
    _, optimizer, loader = _private(model)
    other = _with_copies(model)
    (x,) = next(iter(loader))
    functional_call(model, other, (x,)).square().sum(1).mean().backward()
    with pytest.raises(UncoveredParameterError, match=r"a forward ran on 4 parameter\(s\).*0\.weight"):
        optimizer.step()


@pytest.mark.parametrize("own", [True, False])
def test_own_parameters_are_no_others(own):
    """A functional call with the model's own parameters, and the remedy, are clipped as one-sample autograd says."""
    model, x = _model().double(), torch.randn(8, 3, dtype=torch.float64)
    if not own:
        parametrize.register_parametrization(model[0], "weight", _Scaled())
    wanted = clip_and_sum(per_sample_gradients(model, {"x": x}, lambda m, b: m(b["x"]).square().sum(1), axes={}), 0.3)
    with ghostclip.GhostClipper(model, max_grad_norm=0.3) as clipper:
        output = functional_call(model, dict(model.named_parameters()), (x,)) if own else model(x)
        clipper.backward(output.square().sum(1))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted.clipped[name], rtol=1e-9, atol=1e-12)


class _Scaled(nn.Module):
    def forward(self, weight):
        return 1.5 * weight


@pytest.mark.parametrize(
    "transformed",
    [
        lambda m, x: torch.func.grad(lambda p: functional_call(m, p, (x,)).sum())(dict(m.named_parameters())),
        lambda m, x: torch.vmap(lambda row: m(row[None])[0])(x),
        lambda m, x: torch.func.jacrev(m)(x),
    ],
    ids=["grad", "vmap", "jacrev"],
)
def test_a_call_inside_a_transform_is_refused_by_name(transformed):
    model, x = _model(), torch.randn(4, 3)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        with pytest.raises(UnsupportedModelError, match=r"Sequential runs inside a transform of torch\.func"):
            transformed(model, x)
        assert transformed(copy.deepcopy(model), x) is not None
        clipper.backward(model(x).square().sum(1))


def test_a_copy_that_is_called_instead_leaves_nothing_to_release():
    model = _model()
    _, optimizer, loader = _private(model)
    (x,) = next(iter(loader))
    copy.deepcopy(model)(x).square().sum(1).mean().backward()
    with pytest.raises(GhostClipError, match="without a clipped gradient since the last step"):
        optimizer.step()
