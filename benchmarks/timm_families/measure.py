"""One family: what `ModuleValidator.fix` replaces, and clipped sums against one sample at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ghostclip
from benchmarks.timm_families.families import Family
from benchmarks.timm_families.stand_in import timm
from ghostclip import ModuleValidator

SAMPLES, CLASSES = 3, 5
TOLERANCE = 1e-8
"""Largest relative error of an exact sum in float64, of models that compute all of it in float64."""


@dataclass
class Found:
    """What became of a family.

    Attributes:
        family: Its name.
        model: The model's name.
        parameters: Their number.
        replaced: Modules that `fix` replaced, by class.
        num_groups: Its option; None for the default.
        outcome: "exact", "refused" or "wrong".
        said: Of a refusal or a fault what was said.
        error: Of the clipped sum, relative; None where nothing was compared.
        norm_error: Largest relative error of a sample's norm.
        move: Farthest that leaving out one sample moves the sum, over C.
    """

    family: str
    model: str
    parameters: int = 0
    replaced: dict[str, int] = field(default_factory=dict)
    num_groups: int | None = None
    outcome: str = "exact"
    said: str = ""
    error: float | None = None
    norm_error: float | None = None
    move: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def made(family: Family) -> nn.Module:
    """Return a family's model, as timm makes it, without stochastic depth."""
    torch.manual_seed(0)
    return timm().create_model(family.model, num_classes=CLASSES, **family.options).double().train()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0])
    # Distilled models return the outputs of two heads while they are trained.
    heads = output if isinstance(output, (tuple, list)) else [output]
    return torch.stack([functional.cross_entropy(head, batch[1], reduction="none") for head in heads]).mean(0)


def measure(family: Family) -> Found:
    """Fix a family's model and compare it with one sample at a time."""
    model = made(family)
    found = Found(family.name, family.model, sum(p.numel() for p in model.parameters()), num_groups=family.num_groups)
    fixed = ModuleValidator.fix(model, num_groups=family.num_groups)
    pairs = zip(_by_name(model), _by_name(fixed), strict=True)
    found.replaced = dict(Counter(type(old).__name__ for old, new in pairs if type(old) is not type(new)))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, family.size, family.size, generator=generator, dtype=torch.float64)
    batch = images, torch.arange(SAMPLES) % CLASSES
    report = ghostclip.validate(fixed, batch, _loss, tolerance=TOLERANCE)
    if report.results:
        result = report.results[0]
        found.error, found.norm_error, found.move = result.error, result.norm_error, result.sensitivity
    if not report.ok:
        found.outcome = "wrong" if report.results else "refused"
        found.said = "; ".join(map(str, report.problems))
    return found


def _by_name(model: nn.Module) -> list[nn.Module]:
    """Modules without those inside others that `fix` replaces as a whole."""
    return [part for _, part in sorted(model.named_modules(), key=lambda pair: pair[0])]
