"""What `isinstance` says, what is refused where it is imported, and the sampler that splits batches."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.compat.opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from ghostclip.compat.opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from ghostclip.compat.opacus.utils.adaptive_clipping import DPLossFastGradientAdaptiveClipping
from ghostclip.compat.opacus.utils.batch_memory_manager import BatchSplittingSampler
from ghostclip.compat.opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from ghostclip.errors import InvalidOptionError, NotOfferedError
from ghostclip.facade import GradSampleHooks, GradSampleModule
from ghostclip.optim import DPOptimizer
from tests.compat.pairs import batch, make_private, small_model

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def kinds(thing, *names):
    """The names that a thing is an instance of."""
    return [name.__name__ for name in names if isinstance(thing, name)]


def test_instances_are_told_by_what_they_do():
    optimizers = (DPOptimizerFastGradientClipping, DPPerLayerOptimizer, AdaClipDPOptimizer, DistributedDPOptimizer)
    modules = (GradSampleModule, GradSampleModuleFastGradientClipping)
    flat = make_private("ghostclip.compat.opacus", "hooks")
    assert kinds(flat.optimizer, *optimizers) == ["DPOptimizer"]
    assert kinds(flat.module, *modules) == ["GradSampleModule"]
    per_layer = make_private("ghostclip.compat.opacus", "hooks", options={"clipping": "per_layer"})
    assert kinds(per_layer.optimizer, *optimizers) == ["DPOptimizer", "DPPerLayerOptimizer"]
    ghost = make_private("ghostclip.compat.opacus", "ghost", options={"clipping": "adaptive"})
    assert kinds(ghost.optimizer, *optimizers) == ["DPOptimizer", "AdaClipDPOptimizer"]
    assert kinds(ghost.module, *modules) == ["GradSampleModule", "GradSampleModuleFastGradientClipping"]
    losses = (DPLossFastGradientClipping, DPTensorFastGradientClipping)
    assert kinds(ghost.criterion, *losses) == ["DPLossFastGradientClipping"]
    x, y = batch()
    loss = ghost.criterion(ghost.module(x), y)
    assert kinds(loss / 2, *losses) == ["DPTensorFastGradientClipping"]
    hooks = make_private("ghostclip.compat.opacus", "fast", options={"wrap_model": False}).module
    assert kinds(hooks, GradSampleHooks, GradSampleHooksFastGradientClipping, *modules) == [
        "GradSampleHooks",
        "GradSampleHooksFastGradientClipping",
    ]
    assert kinds(nn.Linear(1, 1), *modules, *optimizers, *losses) == []


def test_a_class_derived_from_a_name_is_a_class():
    class Own(GradSampleModuleFastGradientClipping):
        """A user's."""

    assert isinstance(Own(small_model()), Own)
    assert not isinstance(GradSampleModuleFastGradientClipping(small_model()), Own)
    assert issubclass(DPPerLayerOptimizer, DPOptimizer)


def test_what_is_not_private_is_named():
    model = small_model()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    facade = GradSampleModuleFastGradientClipping(model)
    with pytest.raises(InvalidOptionError, match="optimizer SGD: not private"):
        DPLossFastGradientClipping(facade, plain, nn.CrossEntropyLoss())
    with pytest.raises(InvalidOptionError, match="module Sequential: not wrapped"):
        DPTensorFastGradientClipping(model, plain, torch.ones(3))
    with pytest.raises(InvalidOptionError, match="optimizer SGD: not private"):
        DPLossFastGradientAdaptiveClipping(facade, plain, nn.CrossEntropyLoss())
    with pytest.raises(InvalidOptionError, match="make_private"):
        BatchSplittingSampler(sampler=[[1]], max_batch_size=2, optimizer=plain)
    with pytest.raises(InvalidOptionError, match="attached once"):
        facade.add_hooks()


@pytest.mark.parametrize(
    "module",
    [
        "grad_sample.conv",
        "grad_sample.gsm_no_op",
        "grad_sample.grad_sample_module_fast_gradient_clipping_fsdp",
        "grad_sample.grad_sample_module_fast_gradient_clipping_tp",
        "optimizers.fsdpoptimizer_fast_gradient_clipping",
        "accountants.analysis.prv.compose",
    ],
)
def test_modules_that_are_not_offered_say_why(module):
    with pytest.raises(NotOfferedError, match="is not offered: "):
        importlib.import_module(f"ghostclip.compat.opacus.{module}")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ghostclip.compat.opacus.grad_sample.nothing_like_it")


def split(training, size=2):
    sampler = BatchSplittingSampler(
        sampler=training.loader.batch_sampler, max_batch_size=size, optimizer=training.optimizer
    )
    return DataLoader(training.loader.dataset, batch_sampler=sampler, collate_fn=training.loader.collate_fn)


def train(training, loader, *, stop_after=None):
    for number, (x, y) in enumerate(loader):
        training.optimizer.zero_grad()
        nn.CrossEntropyLoss()(training.module(x), y).backward()
        if number == stop_after:
            return
        training.optimizer.step()


def _moved(*, in_parts):
    """Train for an epoch, and return the parameters."""
    engine, model = PrivacyEngine(accountant="rdp"), small_model()
    x, y = batch(60)
    with pytest.warns(UserWarning, match="seed|generator"):
        module, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(
                torch.utils.data.TensorDataset(x, y), batch_size=12, generator=torch.Generator().manual_seed(2)
            ),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
        )
    from tests.compat.pairs import Training

    training = Training(model, module, optimizer, None, loader)
    state = loader.batch_sampler.state_dict()
    parts = split(training) if in_parts else loader
    assert len(parts) == (30 if in_parts else 5)
    train(training, parts)
    assert len(engine.accountant) == 5
    assert loader.batch_sampler.state_dict() != state
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_parts_make_up_logical_batches():
    # The same batches whole move the parameters by the same.
    torch.testing.assert_close(_moved(in_parts=True), _moved(in_parts=False))
