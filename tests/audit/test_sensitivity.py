"""Without noise, the worst record moves a release by at most C: every strategy, loss shape and family of layers."""

from __future__ import annotations

import math

import pytest
import torch

from ghostclip import GhostClipper
from ghostclip.errors import LossReductionError
from ghostclip.noise import FastNoise
from ghostclip.optim import DPOptimizer
from tests.audit.checks import one_record_moves_at_most_c, one_record_moves_at_most_c_when_accumulated
from tests.audit.subject import LOSS_SHAPES, Subject, quietly, records
from tests.cases import by_name
from tests.exactness.runs import STRATEGIES
from tests.reference import batch_size, take, trainable

# One case of every family of layers and of uses.
FAMILIES = (
    "linear_3d",
    "linear_folded_after_layer",
    "embedding_2d_ids",
    "embedding_bag_weighted",
    "conv2d_first_only",
    "layernorm_2d",
    "custom_vit",
    "custom_prelu",
    "shared_tied_head",
    "shared_linear_twice",
    "mha_cross",
    "moe_index",
    "groupnorm_2d",
    "inplace_residual",
)
ADVERSARIES = {
    "ordinary": 1.0,
    "huge": 1e6,
    "tiny": 1e-9,
    "silent": 0.0,
    "opposite": -1.0,
    "NaN": math.nan,
    "infinite": math.inf,
}


@pytest.mark.parametrize("loss", LOSS_SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_loss_shape(strategy, loss):
    one_record_moves_at_most_c(strategy, loss)
    one_record_moves_at_most_c_when_accumulated(strategy, loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_shapes_release_the_same(strategy):
    releases = [Subject(sigma=0.0, strategy=strategy, loss=loss).vector(records()) for loss in LOSS_SHAPES]
    for release in releases[1:]:
        torch.testing.assert_close(release, releases[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_in_a_column_are_refused(strategy):
    subject = Subject(sigma=0.0, strategy=strategy)
    batch = records()
    losses = torch.nn.functional.cross_entropy(subject.model(batch.x), batch.y, reduction="none")
    with pytest.raises(LossReductionError):
        subject.optimizer.clipper.backward(losses[:, None])


def _released(case, model, optimizer, batch):
    optimizer.zero_grad()
    optimizer.clipper.backward(case.losses(model, batch))
    quietly(optimizer.step)
    return torch.cat([p.grad.double().flatten() for p in trainable(model).values()])


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_layers(name, strategy, device):
    """The first sample is the one that is added, its loss multiplied by what an attacker would choose."""
    case = by_name(name).on(device)
    model, batch = case.model(torch.float32), case.data(torch.float32)
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy, batch_first=case.batch_first)
    clipper.backward(case.losses(model, batch))
    bound = clipper.per_sample_norms.median().item()
    clipper.reset()
    clipper.max_grad_norm = bound
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = DPOptimizer(
        inner, noise_multiplier=0.0, expected_batch_size=1, clipper=clipper, noise_source=FastNoise()
    )
    others = range(1, batch_size(batch, case.axes))
    before = _released(case, model, optimizer, take(batch, others, case.axes))
    assert before.norm() > 0.5 * bound
    for adversary, factor in ADVERSARIES.items():
        weight_B = batch["weight"].clone()
        weight_B[0] *= factor
        after = _released(case, model, optimizer, {**batch, "weight": weight_B})
        moved = (after - before).norm().item() / bound
        assert moved <= 1 + 2e-5, f"{adversary}: {moved:.6g} C"
        assert moved > 0.1 or adversary in {"tiny", "silent", "NaN", "infinite"}, f"{adversary}: moved by {moved:.3g} C"
    clipper.remove()
