"""A clipper that is simply right, and the same clipper with one fault at a time.

It has the surface of GhostClipper that the checks use, and takes one autograd pass per sample. If the checks pass it
and fail each of its faults, they can be trusted on the engine.
"""

import torch
from torch import Tensor, nn

from tests.reference import trainable, whole_norm

FAULTS = (
    "unclipped",
    "clipped_per_parameter",
    "clipped_as_batch",
    "norm_bound_doubled",
    "sum_doubled",
    "mean_instead_of_sum",
    "parameter_not_trained",
    "parameter_not_in_norm",
    "no_cross_terms",
    "samples_swapped",
    "overwrites_gradient",
    "remembers_last_step",
)


class ToyClipper:
    """Clips by one autograd pass per sample.

    Args:
        model: the model.
        max_grad_norm: the clipping norm.
        fault: None, or one of `FAULTS`.
    """

    def __init__(self, model: nn.Module, max_grad_norm: float, fault: str | None = None) -> None:
        self.model, self.max_grad_norm, self.fault = model, max_grad_norm, fault
        self.parameters = trainable(model)
        self.last: dict[str, Tensor] | None = None
        self.uses: list[tuple[str, Tensor, Tensor]] = []
        names = {id(p): name for name, p in self.parameters.items()}
        self.handles = [
            module.register_forward_hook(self._record(names.get(id(module.weight))))
            for module in model.modules()
            if isinstance(module, nn.Linear) and fault == "no_cross_terms"
        ]

    def _record(self, name: str | None):
        def hook(_module: nn.Module, inputs: tuple, output: Tensor) -> None:
            if inputs and name is not None:
                self.uses.append((name, inputs[0].detach(), output))

        return hook

    def backward(self, losses: Tensor) -> None:
        """Add the clipped sum to every p.grad."""
        per_sample = [self._gradient(loss) for loss in losses]
        self.per_sample_norms = torch.stack([self._norm(g, loss) for g, loss in zip(per_sample, losses, strict=True)])
        self.clip_coefficients = self._coefficients(per_sample)
        self.batch_size = len(per_sample)
        total = self._combine(per_sample)
        for name, p in self.parameters.items():
            keep = p.grad if p.grad is not None and self.fault != "overwrites_gradient" else 0.0
            p.grad = total[name].to(p.dtype) + keep
        self.uses.clear()

    def remove(self) -> None:
        """Detach."""
        for handle in self.handles:
            handle.remove()

    def _gradient(self, loss: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True, allow_unused=True)
        pairs = zip(self.parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g.to_dense() for (name, p), g in pairs}

    def _norm(self, gradient: dict[str, Tensor], loss: Tensor) -> Tensor:
        if self.fault == "parameter_not_in_norm":
            gradient = dict(list(gradient.items())[1:]) or gradient
        if self.fault == "no_cross_terms" and self.uses:
            return self._norm_use_by_use(gradient, loss)
        return whole_norm(gradient)

    def _norm_use_by_use(self, gradient: dict[str, Tensor], loss: Tensor) -> Tensor:
        """Add the square norms of the single uses of each Linear's weight, and of a use without a module."""
        outputs = [output for _, _, output in self.uses]
        grads = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        square, rest = torch.zeros((), dtype=torch.float64), dict(gradient)
        for (name, x, _), g in zip(self.uses, grads, strict=True):
            if g is not None:
                weight = g.flatten(0, -2).T @ x.flatten(0, -2)
                square = square + weight.double().square().sum()
                rest[name] = rest[name] - weight
        return (square + whole_norm(rest).square()).sqrt()

    def _coefficients(self, per_sample: list[dict[str, Tensor]]) -> Tensor:
        bound = self.max_grad_norm * (2 if self.fault == "norm_bound_doubled" else 1)
        coef_B = (bound / self.per_sample_norms).clamp(max=1.0)
        if self.fault == "unclipped":
            coef_B = torch.ones_like(coef_B)
        if self.fault == "samples_swapped":
            coef_B = coef_B.roll(1)
        if self.fault == "clipped_as_batch":
            mean = {name: sum(g[name] for g in per_sample) / len(per_sample) for name in self.parameters}
            coef_B = torch.ones_like(coef_B) * (bound / whole_norm(mean)).clamp(max=1.0)
        return coef_B

    def _combine(self, per_sample: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        def clip(name: str, gradient: dict[str, Tensor], coefficient: Tensor) -> Tensor:
            if self.fault == "clipped_per_parameter":
                coefficient = (self.max_grad_norm / gradient[name].norm()).clamp(max=1.0)
            return gradient[name] * coefficient

        pairs = list(zip(per_sample, self.clip_coefficients, strict=True))
        total = {name: sum(clip(name, gradient, c) for gradient, c in pairs) for name in self.parameters}
        if self.fault == "parameter_not_trained":
            total[next(iter(total))] = torch.zeros_like(total[next(iter(total))])
        if self.fault == "remembers_last_step":
            last, self.last = self.last, total
            total = total if last is None else {name: total[name] + last[name] for name in total}
        scale = {"sum_doubled": 2.0, "mean_instead_of_sum": 1 / len(per_sample)}.get(self.fault or "", 1.0)
        return {name: value * scale for name, value in total.items()}
