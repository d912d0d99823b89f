"""The slow twin of every engine: one sample at a time through plain autograd, in float64.

Nothing here imports ghostclip. Shape suffix: B samples.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, object]
LossFunction = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Reference:
    """What an exact engine must produce for one model and one batch.

    Attributes:
        per_sample: for every sample, {parameter name: gradient of that sample's own loss}, float64.
        norms_B: norm of each sample's whole gradient, float64.
        coef_B: min(1, C / norm), float64.
        clipped: {parameter name: sum over samples of coefficient times gradient}, float64.
        max_grad_norm: the clipping norm C.
    """

    per_sample: list[dict[str, Tensor]]
    norms_B: Tensor
    coef_B: Tensor
    clipped: dict[str, Tensor]
    max_grad_norm: float


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each shared one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def batch_size(batch: Batch, axes: Mapping[str, int | None]) -> int:
    """Return the number of samples in `batch`, read from its first tensor that has a batch axis."""
    for key, value in batch.items():
        axis = axes.get(key, 0)
        if isinstance(value, Tensor) and axis is not None:
            return value.shape[axis]
    raise ValueError("the batch holds no tensor with a batch axis")


def take(batch: Batch, samples: Iterable[int], axes: Mapping[str, int | None]) -> Batch:
    """Return the batch of the given samples, the batch axis kept.

    Args:
        batch: named inputs; tensors carry the batch axis named in `axes`, anything else is passed on as it is.
        samples: indices of the samples to keep, in this order.
        axes: batch axis of each tensor: 0 unless listed, None for a tensor that all samples share.

    Returns:
        A new batch with the same names.
    """
    index = torch.tensor(list(samples), dtype=torch.int64)

    def pick(key: str, value: object) -> object:
        axis = axes.get(key, 0)
        if not isinstance(value, Tensor) or axis is None:
            return value
        return value.index_select(axis, index.to(value.device))

    return {key: pick(key, value) for key, value in batch.items()}


def _or_zero(grad: Tensor | None, parameter: nn.Parameter) -> Tensor:
    dense = torch.zeros_like(parameter) if grad is None else grad
    return (dense.to_dense() if dense.is_sparse else dense).detach().double()


def _one_by_one(model: nn.Module, batch: Batch, losses: LossFunction, axes: Mapping[str, int | None]) -> list:
    """Run the model once per sample, on that sample alone."""
    parameters = trainable(model)
    per_sample = []
    for sample in range(batch_size(batch, axes)):
        model.zero_grad(set_to_none=True)
        # .backward() and not autograd.grad: reentrant checkpointing refuses the latter.
        losses(model, take(batch, [sample], axes)).sum().backward()
        per_sample.append({name: _or_zero(p.grad, p) for name, p in parameters.items()})
    model.zero_grad(set_to_none=True)
    return per_sample


def _batched_graph(model: nn.Module, batch: Batch, losses: LossFunction) -> list:
    """Run the model once and differentiate each sample's loss; valid because samples do not mix."""
    parameters = trainable(model)
    per_sample = []
    for loss in losses(model, batch):
        grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        pairs = zip(parameters.items(), grads, strict=True)
        per_sample.append({name: _or_zero(grad, p) for (name, p), grad in pairs})
    return per_sample


def per_sample_gradients(
    model: nn.Module, batch: Batch, losses: LossFunction, *, axes: Mapping[str, int | None], mode: str = "one_by_one"
) -> list[dict[str, Tensor]]:
    """Return every sample's gradient as {parameter name: float64 tensor}.

    Args:
        model: the model; its gradients are left empty.
        batch: named inputs, see `take`.
        losses: computes the losses `[B]` of a batch.
        axes: batch axis of each input, see `take`.
        mode: "one_by_one" runs the model on each sample alone; "batched_graph" runs it once, for models with
            dropout, whose masks depend on the shape of the batch.

    Returns:
        One dictionary per sample; a parameter that the sample does not use has a zero gradient.

    Raises:
        ValueError: for an unknown `mode`.
    """
    if mode == "one_by_one":
        return _one_by_one(model, batch, losses, axes)
    if mode == "batched_graph":
        return _batched_graph(model, batch, losses)
    raise ValueError(f"unknown mode {mode!r}: use 'one_by_one' or 'batched_graph'")


def whole_norm(gradient: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of a gradient taken over all its parameters, float64 scalar."""
    return torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt()


def clip_and_sum(per_sample: list[dict[str, Tensor]], max_grad_norm: float | None = None) -> Reference:
    """Clip each sample's whole gradient to `max_grad_norm` and sum.

    Args:
        per_sample: result of `per_sample_gradients`, at least one sample.
        max_grad_norm: C; by default a value that clips some samples and leaves others (a lone sample is halved).

    Returns:
        The reference; a zero gradient has coefficient 1.
    """
    norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
    bound = clip_between(norms_B) if max_grad_norm is None else max_grad_norm
    coef_B = torch.where(norms_B > bound, bound / norms_B, torch.ones_like(norms_B))
    clipped = {
        name: torch.stack([c * g[name] for c, g in zip(coef_B, per_sample, strict=True)]).sum(0)
        for name in per_sample[0]
    }
    return Reference(per_sample, norms_B, coef_B, clipped, bound)


def clip_between(norms_B: Tensor) -> float:
    """Return a clipping norm between the two middle norms; half the norm when there is one sample."""
    ordered = norms_B.sort().values
    if len(ordered) == 1:
        return 0.5 * ordered[0].item()
    middle = len(ordered) // 2
    return 0.5 * (ordered[middle - 1] + ordered[middle]).item()
