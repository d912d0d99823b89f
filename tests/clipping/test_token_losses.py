"""token_losses: each sample's own mean, whatever the other samples' lengths are."""

import pytest
import torch
from torch.nn import functional

from ghostclip.losses import token_losses

B, T, V = 3, 5, 7


def _data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=generator, dtype=dtype)
    labels = torch.randint(V, (B, T), generator=generator)
    labels[0, 2:] = -100
    labels[1] = -100
    return logits, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shift", [True, False])
def test_each_sample_alone(shift, reduction, smoothing):
    logits, labels = _data()
    got = token_losses(logits, labels, shift=shift, reduction=reduction, label_smoothing=smoothing)
    assert got.shape == (B,)
    assert got[1] == 0
    for sample in (0, 2):
        scores, classes = (logits[sample, :-1], labels[sample, 1:]) if shift else (logits[sample], labels[sample])
        kept = classes != -100
        alone = functional.cross_entropy(scores[kept], classes[kept], reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(got[sample], alone)


def test_masked_sample_has_no_gradient_and_no_nan():
    logits, labels = _data()
    logits.requires_grad_()
    token_losses(logits, labels).sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[1].any()


def test_half_precision_is_summed_in_single():
    assert token_losses(_data(torch.bfloat16)[0], _data()[1]).dtype == torch.float32
