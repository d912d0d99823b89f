"""What becomes of families of timm's models; all of them are in benchmarks/results/timm.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ghostclip import ModuleValidator, PrivacyEngine
from tests.integrations.table import Row, row
from tests.integrations.timm_families import FAMILIES, TOLERANCE, Family, made, measure

ROWS: list[Row] = []
_HOST = {"tool": "timm", "hosts": ("timm",)}


def _row(family: Family) -> None:
    def drive(folder: Path) -> None:
        require_exact(family)

    drive.__doc__ = f"{family.name} ({family.model}) after ModuleValidator.fix."
    note = "clipped sum against one sample at a time in float64, leave-one-out"
    row(ROWS, **_HOST, outcome="exact", note=note)(drive)


def require_exact(family: Family) -> None:
    """Assert that a family's clipped sums are exact once it is fixed.

    Args:
        family: The family.
    """
    found = measure(family)
    assert found.outcome == "exact", f"{found.outcome}: {found.said}"
    assert found.error is not None
    assert found.error <= TOLERANCE
    assert found.move is not None
    assert found.move <= 1 + 1e-9


# The others are tests of their own (test_timm_families) and a table of their own.
for _family in FAMILIES:
    if _family.quick:
        _row(_family)


@row(ROWS, **_HOST, outcome="refused", note=r"BatchNormAct2d.*Replace it by GroupNorm \(ModuleValidator.fix does\)")
def without_fix(folder: Path) -> None:
    """A model with batch norms, as it is."""
    _private(_made("efficientnet"))


@row(ROWS, **_HOST, outcome="exact", note="weights and activations of what replaces it, and no batch norm left")
def activations_inside(folder: Path) -> None:
    """BatchNormAct2d keeps its weights and its activation."""
    model = _made("efficientnet")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    fixed = ModuleValidator.fix(model)
    old = dict(model.named_modules())
    replaced = {name: part for name, part in fixed.named_modules() if type(part) is not type(old[name])}
    assert replaced
    for name, part in replaced.items():
        norm = old[name]
        x = torch.randn(2, norm.num_features, 3, 3, dtype=torch.float64)
        due = functional.group_norm(x, part.num_groups, norm.weight, norm.bias, norm.eps)
        assert torch.allclose(part(x), norm.act(norm.drop(due))), name


@row(ROWS, **_HOST, outcome="refused", note="lengths|other samples|compares samples|not a number of")
def mixed_images(folder: Path) -> None:
    """Timm's Mixup, before the model and in the loss, seen by ghostclip.validate."""
    import ghostclip

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    batch = torch.randn(4, 3, 2, 2, dtype=torch.float64), torch.arange(4) % 3

    def loss(model: nn.Module, pair: tuple[Any, Any]) -> Any:
        images, labels = pair
        # As timm.data.Mixup does with each pair of a batch that is one of its modes.
        mixed = 0.7 * images + 0.3 * images.flip(0)
        target = functional.one_hot(labels, 3).double()
        target = 0.7 * target + 0.3 * target.flip(0)
        return functional.cross_entropy(model(mixed), target)

    ghostclip.validate(model, batch, loss).raise_if_bad()


def _made(name: str) -> nn.Module:
    return made(next(family for family in FAMILIES if family.name == name))


def _private(model: nn.Module) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, 64, 64), torch.arange(8) % 5)
    make: Callable[..., Any] = PrivacyEngine().make_private
    make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
