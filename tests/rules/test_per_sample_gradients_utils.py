"""The check that users run on layers of their own: it passes what is right and names what is wrong."""

import pytest
import torch
from torch import nn

from ghostclip.compat.opacus.utils.per_sample_gradients_utils import compute_opacus_grad_sample, get_grad_sample_modes
from ghostclip.errors import DataError, InvalidOptionError, UnsupportedModelError
from ghostclip.rules import registry
from ghostclip.rules.registry import register_grad_sampler
from ghostclip.validation.layer_check import (
    check_per_sample_gradients_are_correct,
    compute_grad_sample,
    compute_microbatch_grad_sample,
    is_batch_empty,
    per_sample_gradient_report,
)
from tests.cases.registered import ByGradients, affine_gradients


@pytest.fixture
def wrong_layer(monkeypatch):
    """Return a layer whose sampler halves a gradient."""
    monkeypatch.setattr(registry, "GRAD_SAMPLERS", dict(registry.GRAD_SAMPLERS))

    class Wrong(ByGradients):
        """A layer with a wrong sampler."""

    @register_grad_sampler(Wrong)
    def halved(module, activations, backprops):
        found = affine_gradients(module, activations, backprops)
        return {module.weight: 0.5 * found[module.weight], module.bias: found[module.bias]}

    return Wrong(5, 4)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(5, 4), torch.randn(4, 3, 5)),
        (nn.Linear(5, 4).double(), torch.randn(4, 3, 5, dtype=torch.float64)),
        (nn.Linear(5, 4).bfloat16(), torch.randn(4, 3, 5, dtype=torch.bfloat16)),
        (nn.Embedding(7, 3), torch.randint(7, (4, 5))),
        (nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), torch.randn(3, 2, 4, 4)),
        (nn.Bilinear(5, 4, 3), (torch.randn(4, 5), torch.randn(4, 4))),
        (ByGradients(5, 4), torch.randn(1, 3, 5)),
        (nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5)).eval(), torch.randn(4, 5)),
    ],
)
def test_right_layers_pass(module, x):
    assert check_per_sample_gradients_are_correct(x, module)


@pytest.mark.parametrize("strategy", get_grad_sample_modes())
def test_wrong_layer_fails_in_every_strategy(wrong_layer, strategy):
    x = torch.randn(4, 3, 5)
    assert not check_per_sample_gradients_are_correct(x, wrong_layer, strategy=strategy)
    with pytest.raises(UnsupportedModelError, match=rf"Wrong: .*\nWRONG {strategy}"):
        check_per_sample_gradients_are_correct(x, wrong_layer, strategy=strategy, raise_if_wrong=True)


def test_layer_that_mixes_samples_is_reported():
    mixing = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4))
    report = per_sample_gradient_report(torch.randn(4, 2, 6), mixing)
    assert not report.correct
    assert {row.what[:8] for row in report.rows} == {"refused:"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_samples_are_those_of_the_samples_own_losses(reduction):
    module, x = nn.Linear(5, 4), torch.randn(4, 3, 5)
    found = compute_grad_sample(x, module, loss_reduction=reduction)
    wanted = compute_microbatch_grad_sample(x, module)
    assert compute_opacus_grad_sample is compute_grad_sample
    for name, grads in wanted.items():
        torch.testing.assert_close(found[name], grads)


def test_what_cannot_be_checked_is_named():
    linear = nn.Linear(5, 4)
    assert is_batch_empty(torch.zeros(0, 5))
    with pytest.raises(DataError, match="no sample"):
        check_per_sample_gradients_are_correct(torch.zeros(0, 5), linear)
    with pytest.raises(DataError, match=r"hold \[3, 4\] samples"):
        check_per_sample_gradients_are_correct((torch.randn(4, 5), torch.randn(3, 4)), nn.Bilinear(5, 4, 2))
    with pytest.raises(InvalidOptionError, match="strategy='gost' is not known"):
        check_per_sample_gradients_are_correct(torch.randn(4, 5), linear, strategy="gost")
    with pytest.raises(InvalidOptionError, match="another output each time"):
        check_per_sample_gradients_are_correct(torch.randn(4, 5), nn.Sequential(linear, nn.Dropout(0.5)))
    with pytest.raises(InvalidOptionError, match="no trainable parameter"):
        check_per_sample_gradients_are_correct(torch.randn(4, 5), nn.Linear(5, 4).requires_grad_(False))
    with pytest.raises(InvalidOptionError, match="are the same; give one"):
        check_per_sample_gradients_are_correct(
            torch.randn(4, 5), linear, strategy="hooks", grad_sample_mode="functorch"
        )
    with pytest.raises(InvalidOptionError, match="use 'hooks'"):
        compute_grad_sample(torch.randn(4, 5), linear, grad_sample_mode="ghost")
    assert check_per_sample_gradients_are_correct(torch.randn(4, 5), linear, grad_sample_mode="functorch")
