"""The same comparison for Opacus, in the ways a user would call it.

Shape suffix: B samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.cases import Case
from tests.exactness.runs import gradients, relative_error
from tests.reference import Batch, Reference, take, whole_norm

Sums = dict[str, Tensor]


class _Hooks:
    """Per-sample gradients kept in `grad_sample`, clipped by the optimizer."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.inner = model
        self.model = GradSampleModule(model, loss_reduction="mean")
        self.optimizer = DPOptimizer(
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            expected_batch_size=1,
        )

    def clipped(self, case: Case, batch: Batch) -> Sums:
        self.optimizer.zero_grad(set_to_none=True)
        case.losses(self.model, batch).mean().backward()
        self.optimizer.clip_and_accumulate()
        return _named(self.inner, lambda p: p.summed_grad)


class _Ghost:
    """Norms in a first backward pass, a second one with the losses weighted."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        self.inner = model
        self.model = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=max_grad_norm, use_ghost_clipping=True
        )

    def clipped(self, case: Case, batch: Batch) -> Sums:
        self.model.zero_grad(set_to_none=True)
        losses_B = case.losses(self.model, batch)
        losses_B.mean().backward(retain_graph=True)
        coef_B = self.model.get_clipping_coef().detach()
        self.model.zero_grad(set_to_none=True)
        self.model.disable_hooks()
        (coef_B * losses_B).sum().backward()
        self.model.enable_hooks()
        return gradients(self.inner)


WAYS: dict[str, Callable[[nn.Module, float], _Hooks | _Ghost]] = {"hooks": _Hooks, "ghost": _Ghost}


def _named(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> Sums:
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if of(p) is None else of(p).detach().double().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def compare(case: Case, way: str, want: Reference) -> dict[str, object]:
    """Run Opacus on the batch, then without each sample in turn."""
    try:
        with warnings.catch_warnings(), case.numerics(torch.float64):
            warnings.simplefilter("ignore")
            return _compared(case, way, want)
    except Exception as problem:  # noqa: BLE001 - whatever it raises is a result of the comparison
        return {"refused": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}


def _compared(case: Case, way: str, want: Reference) -> dict[str, object]:
    batch = case.data(torch.float64)
    engine = WAYS[way](case.model(torch.float64), want.max_grad_norm)
    whole = engine.clipped(case, batch)
    samples = range(len(want.norms_B))
    rests = [engine.clipped(case, take(batch, [i for i in samples if i != out], case.axes)) for out in samples]
    moved = max(whole_norm({name: whole[name] - rest[name] for name in whole}).item() for rest in rests)
    return {"error": relative_error(whole, want.clipped), "moved": moved / want.max_grad_norm}
