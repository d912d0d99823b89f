"""Layer and RMS norm where a kernel forms both gradients, shown with its twin in its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper, kernels


class _Norm(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.norm, self.head = make(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)).flatten(1)


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "layer without bias": lambda: nn.LayerNorm(6, bias=False),
    "layer, another eps": lambda: nn.LayerNorm(6, eps=0.1),
    "rms": lambda: nn.RMSNorm(6, eps=1e-3),
    "rms, eps of the type": lambda: nn.RMSNorm(6),
}


@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("shape", [(3, 6), (3, 5, 6), (3, 2, 4, 6)])
@pytest.mark.parametrize("name", NORMS)
def test_the_factors_are_the_same(name, shape, frozen, monkeypatch):
    found, asked = [], []

    def fused(x: torch.Tensor, g: torch.Tensor) -> bool:
        asked.append((x.shape, g.shape))
        return True

    for answer in (lambda x, g: False, fused):
        monkeypatch.setattr(kernels, "is_fused", answer)
        torch.manual_seed(0)
        model, x = _Norm(NORMS[name]), torch.randn(shape)
        if frozen and getattr(model.norm, frozen, None) is not None:
            getattr(model.norm, frozen).requires_grad_(False)
        clipper = GhostClipper(model, max_grad_norm=0.3, strategy="bookkeeping")
        clipper.backward(model(x).square().sum(1))
        found.append([clipper.per_sample_norms, *(p.grad for p in model.parameters() if p.requires_grad)])
    weight = frozen != "weight"
    assert bool(asked) == (weight and name != "rms, eps of the type")
    assert all(one == other and len(one) == 3 for one, other in asked)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)
