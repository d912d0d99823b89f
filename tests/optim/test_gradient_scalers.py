"""A gradient scaler neither scales a private sum nor loses a release: what is scaled is refused, the rest is exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import ghostclip
from ghostclip.errors import GhostClipError, InvalidOptionError, LossReductionError
from tests.engine.training import clipped_sum, declared, small_model
from tests.optim.test_sums_out_of_reach import BATCH, DATA, STRATEGIES, Run

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
# Not all samples are clipped, so that the scale of the losses shows.
LOOSE = 6.0


SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu"),
    "scale of one": lambda: torch.amp.GradScaler("cpu", init_scale=1.0),
    "sharded": lambda: ShardedGradScaler("cpu"),
}
every_scaler = pytest.mark.parametrize("make", SCALERS.values(), ids=SCALERS)


def _losses(run, reduction="none", batch=BATCH):
    return nn.functional.cross_entropy(run.model(batch[0].double()), batch[1], reduction=reduction)


SCALED = {
    "losses": lambda run, scaler: run.optimizer.clipper.backward(scaler.scale(_losses(run))),
    "losses in a list": lambda run, scaler: run.optimizer.clipper.backward(scaler.scale([_losses(run)])[0]),
    "losses, doubled": lambda run, scaler: run.optimizer.clipper.backward(2 * scaler.scale(_losses(run))),
    "scaled per token": lambda run, scaler: run.optimizer.clipper.backward(
        scaler.scale(_losses(run)).view(8, 1).sum(1)
    ),
    "mean": lambda run, scaler: run.optimizer.clipper.backward(scaler.scale(_losses(run, "mean"))),
    "plain backward": lambda run, scaler: scaler.scale(_losses(run, "mean")).backward(),
    "mean of losses": lambda run, scaler: scaler.scale(_losses(run)).mean().backward(),
}


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
@every_scaler
@pytest.mark.parametrize("way", SCALED)
def test_a_scaled_loss_is_refused_before_anything_is_added(way, make, strategy):
    run = Run(strategy)
    with pytest.raises(GhostClipError, match=r"GradScaler|two backward"):
        SCALED[way](run, make())
    assert not run.optimizer.clipper.has_clipped_sum
    want = clipped_sum(run.bare, BATCH, 0.5)
    run.backward()
    run.optimizer.step()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)


@every_strategy
@every_scaler
@pytest.mark.parametrize("used", [True, False])
def test_unscaling_and_clipping_change_no_sum_and_the_step_is_refused_or_exact(make, used, strategy):
    run, scaler = Run(strategy), make()
    for number in range(3):
        want = clipped_sum(run.bare, BATCH, 0.5)
        if used:
            scaler.scale(torch.ones(()))
        run.backward()
        # The sharded one exchanges what it found with other ranks, of which there are none here.
        if used and not isinstance(scaler, ShardedGradScaler):
            scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.bare.parameters(), 1e-3)
        with pytest.raises((InvalidOptionError, AssertionError), match=r"GradScaler|_scale is None"):
            scaler.step(run.optimizer)
        run.optimizer.step()
        if used and not isinstance(scaler, ShardedGradScaler):
            scaler.update(4.0)
        torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)
        assert len(run.engine.accountant) == number + 1
        if number == 1:
            run.optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["ghost", "fast"])
@every_scaler
def test_a_private_criterion_is_not_scaled(make, mode):
    model = small_model()
    private, optimizer, criterion, _ = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=declared(DATA, 8),
        noise_multiplier=1.0,
        max_grad_norm=LOOSE,
        grad_sample_mode=mode,
    )
    with pytest.raises((LossReductionError, AttributeError, AssertionError, ValueError)):
        make().scale(criterion(private(BATCH[0]), BATCH[1])).backward()
    assert not optimizer.clipper.has_clipped_sum


def _scaling():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


def _lightning():
    plugins = pytest.importorskip("lightning.pytorch.plugins.precision.amp")
    plugin = plugins.MixedPrecision("16-mixed", "cpu", _scaling())
    return lambda optimizer: plugin.optimizer_step(optimizer, nn.Linear(1, 1), lambda: torch.ones(()))


def _fabric():
    plugins = pytest.importorskip("lightning.fabric.plugins.precision.amp")
    plugin = plugins.MixedPrecision("16-mixed", "cpu", _scaling())
    return plugin.optimizer_step


def _accelerate():
    optimizers = pytest.importorskip("accelerate.optimizer")
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    return lambda optimizer: optimizers.AcceleratedOptimizer(optimizer, scaler=_scaling()).step()


@pytest.mark.parametrize("stepper", [_lightning, _fabric, _accelerate])
def test_scalers_of_frameworks_are_refused(stepper):
    step, run = stepper(), Run()
    want = clipped_sum(run.bare, BATCH, 0.5)
    run.backward()
    with pytest.raises(InvalidOptionError, match="GradScaler"):
        step(run.optimizer)
    assert not run.applied
    run.optimizer.step()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)


def test_clipping_by_lightning_in_16_bits_is_told_from_a_scaler():
    plugins = pytest.importorskip("lightning.pytorch.plugins.precision.amp")
    with pytest.raises(InvalidOptionError, match=r"clip_gradients .* leave it out, max_grad_norm"):
        plugins.MixedPrecision("bf16-mixed", "cpu").clip_gradients(Run().optimizer, 0.5)
