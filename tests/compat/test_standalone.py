"""Facade, optimizer and criterion put together by hand, as scripts that do not use an engine do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ghostclip.compat.opacus.grad_sample import GradSampleModuleFastGradientClipping, wrap_model
from ghostclip.compat.opacus.optimizers import AdaClipDPOptimizer, DPPerLayerOptimizer, get_optimizer_class
from ghostclip.compat.opacus.optimizers.utils import params
from ghostclip.compat.opacus.schedulers import StepGradClip
from ghostclip.compat.opacus.utils.adaptive_clipping.adaptive_clipping_utils import DPLossFastGradientAdaptiveClipping
from ghostclip.compat.opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from ghostclip.errors import InvalidOptionError
from ghostclip.facade import GradSampleModule
from ghostclip.optim import DPOptimizer
from tests.compat.pairs import batch, clipped_sum, package, small_model

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")
BOUND = 0.5


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def options(**more):
    return {"noise_multiplier": 0.0, "expected_batch_size": 6, **more}


def released(model: nn.Module) -> torch.Tensor:
    """What a step of plain SGD with a step length of 1 was given, times the batch size."""
    return 6 * (flat(small_model().parameters()) - flat(model.parameters())).detach()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("wrap", [True, False])
def test_facade_and_optimizer_find_each_other(mode, wrap):
    model = small_model()
    facade = wrap_model(model, mode, wrap)
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=BOUND, **options())
    assert optimizer.clipper is facade.clipper
    assert params(optimizer) == optimizer.params
    x, y = batch()
    nn.CrossEntropyLoss()(model(x), y).backward()
    assert facade.get_norm_sample().shape == facade.get_clipping_coef().shape == (6,)
    facade.del_grad_sample()
    assert not hasattr(model[0].weight, "grad_sample")
    optimizer.step()
    torch.testing.assert_close(released(model), clipped_sum(BOUND))


def test_optimizer_without_a_facade_is_refused():
    model = small_model()
    with pytest.raises(InvalidOptionError, match="nobody clips"):
        DPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0, **options())
    facade = GradSampleModule(model)
    facade.remove_hooks()
    with pytest.raises(InvalidOptionError, match="nobody clips"):
        DPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0, **options())


@pytest.mark.parametrize("ghost", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_two_passes_by_hand(ghost, as_tensor):
    model = small_model()
    facade = GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND, use_ghost_clipping=ghost)
    assert facade.clipper.strategy == ("ghost" if ghost else "fast")
    optimizer = get_optimizer_class("flat", False, "ghost")(
        torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=BOUND, **options()
    )
    x, y = batch()
    if as_tensor:
        losses = nn.functional.cross_entropy(facade(x), y, reduction="none")
        DPTensorFastGradientClipping(facade, optimizer, losses).backward()
    else:
        DPLossFastGradientClipping(facade, optimizer, nn.CrossEntropyLoss())(facade(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(released(model), clipped_sum(BOUND))
    with pytest.raises(InvalidOptionError, match="use one"):
        DPLossFastGradientClipping(facade, optimizer, nn.CrossEntropyLoss(), "sum")
    with pytest.raises(InvalidOptionError, match="not the private optimizer of this module"):
        DPLossFastGradientClipping(GradSampleModule(small_model()), optimizer, nn.CrossEntropyLoss())


def test_per_layer_by_hand():
    model = small_model()
    GradSampleModule(model)
    bounds = [0.1, 0.2, 0.3, 0.4]
    optimizer = DPPerLayerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=bounds, **options())
    assert optimizer.max_grad_norm == pytest.approx(math.sqrt(sum(b * b for b in bounds)))
    x, y = batch()
    nn.CrossEntropyLoss()(model(x), y).backward()
    for p, bound in zip(model.parameters(), bounds, strict=True):
        norms = p.grad_sample.flatten(1).norm(dim=1)
        factors = (bound / norms).clamp(max=1)
        total = optimizer.clipper.summed_gradient(p)
        torch.testing.assert_close(total, torch.einsum("b,b...->...", factors, p.grad_sample))
    assert any(
        (p.grad_sample.flatten(1).norm(dim=1) > b).any() for p, b in zip(model.parameters(), bounds, strict=True)
    )


def test_adaptive_by_hand():
    model = small_model()
    GradSampleModule(model)
    optimizer = AdaClipDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        **options(),
        target_unclipped_quantile=1.0,
        clipbound_learning_rate=1.0,
        max_clipbound=10.0,
        min_clipbound=0.01,
        unclipped_num_std=2.0,
        max_grad_norm=1e-2,
    )
    x, y = batch()
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
    # All six were clipped, so the bound grows by e.
    assert optimizer.max_grad_norm == pytest.approx(1e-2 * math.e)
    with pytest.raises(InvalidOptionError, match="its bound moves by itself; use no schedule"):
        StepGradClip(optimizer, step_size=1, gamma=0.5)


def test_an_adaptive_criterion_needs_the_expected_size_of_batches():
    model = small_model()
    facade = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    given = options(expected_batch_size=None, loss_reduction="sum", max_grad_norm=BOUND)
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **given)
    with pytest.raises(InvalidOptionError, match="expected_batch_size=None: an adaptive clip bound"):
        DPLossFastGradientAdaptiveClipping(facade, optimizer, nn.CrossEntropyLoss(reduction="sum"), "sum")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["ghostclip.compat.opacus", "opacus"])
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_facade_alone_leaves_the_gradient_of_autograd(name, reduction):
    pytest.importorskip(name)
    x, y = batch()
    plain, criterion = small_model(), nn.CrossEntropyLoss(reduction=reduction)
    facade = package(name).GradSampleModule(small_model(), loss_reduction=reduction)
    for _ in range(2):
        criterion(plain(x), y).backward()
        facade.set_grad_sample_to_none()
        criterion(facade(x), y).backward()
        for p, q in zip(facade.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    once = small_model()
    criterion(once(x), y).backward()
    for p, q in zip(facade.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(p.grad_sample.sum(0) / (len(x) if reduction == "mean" else 1), q.grad)


def test_a_bound_or_an_optimizer_ends_the_gradient_of_autograd():
    x, y = batch()
    for make in (_bounded, _owned):
        model = small_model()
        clipper = make(model)
        nn.CrossEntropyLoss()(model(x), y).backward()
        found = torch.cat([clipper.summed_gradient(p).flatten() for p in model.parameters()])
        torch.testing.assert_close(found, clipped_sum(0.5))


def _bounded(model):
    clipper = GradSampleModule(model).clipper
    clipper.max_grad_norm = 0.5
    return clipper


def _owned(model):
    module = GradSampleModule(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=6)
    return module.clipper
