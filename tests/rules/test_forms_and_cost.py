"""Each rule's factors have the form it promises, and cost no more than a non-private step and a norm.

With 16 samples a loop over them would cost more than ten times a non-private step; the limits below are far under it.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.flops import counter
from tests.cases.indexing import Looked, WindowBias
from tests.exactness.runs import engine

SAMPLES = 16
ROWS, OUTER, WINDOWS, DENSE = "rows", "outer product", "outer product of windows", "dense"
AT_ONCE = "dense, sample by sample at once"


class Wide(nn.Module):
    """A parameter and the expression that consumes it, after a linear layer of 32 features."""

    def __init__(self, shape, use):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.p = nn.Parameter(torch.randn(shape))
        self.use = use

    def forward(self, x):
        """Map (B, 12, 32) to whatever the expression gives."""
        return self.use(self.p, self.first(x))


def _on_wide(shape, use):
    return lambda: (Wide(shape, use), torch.randn(SAMPLES, 12, 32))


def _layer(build, *shape):
    return lambda: (build(), torch.randn(SAMPLES, *shape))


# Name -> (model and data, parameter, how coverage() shows it, limit of the ratio to a non-private step).
TABLE = {
    "left product": (_on_wide((24, 12), lambda p, x: p @ x), "p", f"matmul: {OUTER}", 1.3),
    "heads": (
        _on_wide((4, 8, 32), lambda p, x: x.unflatten(2, (4, 8)).transpose(1, 2) @ p), "p", f"matmul: {OUTER}", 1.3,
    ),
    "einsum": (_on_wide((32, 4, 8), lambda p, x: torch.einsum("btd,dhe->bthe", x, p)), "p", f"einsum: {OUTER}", 1.3),
    "einsum turned": (
        _on_wide((4, 32, 8), lambda p, x: torch.einsum("btd,hde->bhte", x, p)), "p", f"einsum: {OUTER}", 1.3,
    ),
    "tensordot": (_on_wide((32, 24), lambda p, x: torch.tensordot(x, p, 1)), "p", f"tensordot: {OUTER}", 1.3),
    "factors of a product": (
        _on_wide((4, 32), lambda p, x: torch.einsum("bti,ri,ro->bto", x, p, p)), "p", f"einsum: {OUTER}", 1.6,
    ),
    "transposed convolution": (
        _layer(lambda: nn.Sequential(nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 6, 3, 2)), 4, 7, 7),
        "1.weight", f"conv_transpose2d: {WINDOWS}", 1.4,
    ),
    "depthwise transposed": (
        _layer(lambda: nn.Sequential(nn.Conv1d(4, 8, 1), nn.ConvTranspose1d(8, 8, 3, groups=8)), 4, 21),
        "1.weight", f"conv_transpose1d: {WINDOWS}", 1.5,
    ),
    "prelu": (
        _layer(lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.PReLU(8)), 4, 21), "1.weight", f"prelu: {DENSE}", 1.3,
    ),
    "picked": (
        lambda: (Looked((11, 32), lambda p, ids: p[ids]), torch.randint(11, (SAMPLES, 4))),
        "p", f"__getitem__: {ROWS}", 1.3,
    ),
    "window bias": (_layer(WindowBias, 9, 6), "table", f"add: {DENSE}", 1.5),
    "masked positions": (
        _on_wide((), lambda p, x: x.masked_fill(x < 0, p)), "p", f"where: {DENSE}", 1.4,
    ),
    "attention on parameters": (
        _on_wide((2, 10, 32), lambda p, x: functional.scaled_dot_product_attention(x, p[0], p[1])),
        "p", f"scaled_dot_product_attention: {AT_ONCE}", 2.0,
    ),
}  # fmt: skip


def _losses(model, x):
    return model(x).flatten(1).square().mean(1)


def _count(step):
    with counter() as counted:
        step()
    return counted.get_total_flops()


@pytest.mark.parametrize("name", TABLE)
def test_form_and_cost(name):
    build, parameter, form, limit = TABLE[name]
    torch.manual_seed(0)
    model, x = build()
    non_private = _count(lambda: _losses(model, x).mean().backward())
    model.zero_grad(set_to_none=True)
    clipper = engine("bookkeeping")(model, 1.0)
    # The evidence, and the comparisons of what has no rule, are paid once.
    for _ in range(4):
        clipper.backward(_losses(model, x))
    private = _count(lambda: clipper.backward(_losses(model, x)))
    assert {row.name: row.handled for row in clipper.coverage()}[parameter] == form
    # Gradients that are tensors already are weighted and added up: two operations an entry.
    weighted = 2 * SAMPLES * sum(p.numel() for p in model.parameters())
    assert private <= limit * non_private + weighted, f"{private / max(1, non_private):.3f} times a non-private step"
