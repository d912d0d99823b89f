"""What is checked: batches of any form, loss functions as users have them, a model left as it was, and the slow twin.

The slow twin are gradients by plain autograd, of one sample or of some, without the engine.

Shape letter: B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.clipping.coefficients import clip_coefficients
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.evidence.dependence import batch_axis_of, same_randomness
from ghostclip.evidence.module_state import restored
from ghostclip.evidence.randomness import Randomness


def plain_batch(batch: Any) -> Any:
    """Return a batch with other mappings (such as those of tokenizers) made dictionaries, inside others as well."""
    if isinstance(batch, Mapping):
        return {key: plain_batch(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(plain_batch(item) for item in batch)
    return batch


def count_samples(batch: Any, *, axis: int) -> int:
    """Return the number of samples of a batch, which its first tensor with a batch axis tells."""
    # At least 2. Refused where no tensor tells, and where all samples are the same.
    tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise DataError(
            "validate: the batch holds no tensor with a batch axis. Give a tensor, a tuple, a list or a dict."
        )
    first = tensors[0]
    size = first.shape[axis if axis < first.dim() else 0]
    if size < 2:
        raise DataError(
            f"validate: the batch has {size} sample(s); whether samples mix shows from two on. Give 2 to 16 samples."
        )
    if all(_are_all_alike(tensor, size=size, axis=axis) for tensor in tensors):
        raise DataError(
            f"validate: the {size} samples of the batch are all the same, so that replacing one by another shows "
            "nothing. Give samples that differ."
        )
    return size


def _are_all_alike(tensor: Tensor, *, size: int, axis: int) -> bool:
    dim = batch_axis_of(tensor, batch_size=size, axis=axis)
    return dim is None or torch.equal(tensor, tensor.roll(1, dim))


LossFn = Callable[[nn.Module, Any], Tensor]


def as_loss_fn(loss: nn.Module | Callable[..., Tensor] | None, batch: Any) -> LossFn:
    """Return the function that computes the loss of a batch."""
    # `loss`: a criterion (a module, or a function of torch.nn.functional) for batches of inputs and targets; a function
    # that is called as it is, ``loss(model, batch)``; None for models that compute their own loss.
    if loss is None:
        if not isinstance(batch, Mapping):
            raise InvalidOptionError(
                f"loss=None: the model's own loss is model(**batch).loss, for which the batch has to be a dict (with "
                f"labels); it is a {type(batch).__name__}. Give the loss: a criterion, or a function of model and "
                "batch."
            )
        return own_loss
    if isinstance(loss, nn.Module) or getattr(loss, "__module__", None) == "torch.nn.functional":
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InvalidOptionError(
                f"loss={type(loss).__name__}: a criterion is called with model(inputs) and targets, for which the "
                "batch has to be a pair. Give a function instead: loss(model, batch)."
            )
        return lambda model, pair: loss(model(pair[0]), pair[1])
    if not callable(loss):
        raise InvalidOptionError(
            f"loss={loss!r}: give a criterion, a function of model and batch, or None for a model with its own loss."
        )
    return loss


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss that a model computes itself, as those of transformers do."""
    # `batch`: its arguments, labels among them.
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise InvalidOptionError(
            f"loss=None: {type(model).__name__} returned no loss for a batch of {', '.join(batch)}. Add the labels to "
            "the batch, or give the loss: a function of model and batch."
        )
    return loss


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put everything about a model, and the global generators, back as they were."""
    # Gradients are None inside.
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes, generators = [(module, module.training) for module in model.modules()], Randomness(tensors)
    with restored(model):
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            generators.restore()
            for module, training in modes:
                module.training = training
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    # A copy counts as a change of the tensor: only where it is needed.
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout rate that modules keep as a number to 0: dropout layers, attention, recurrent layers, paths."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            rate = "drop" in name.lower() or (name == "p" and isinstance(module, _torch.AnyDropout))
            if rate and isinstance(value, float) and 0 < value <= 1:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


# One gradient over all trainable parameters, float64, flat.
Flat = Tensor


@dataclass(frozen=True)
class Subject:
    """What is checked."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]  # called with the model and a batch
    batch_size: int  # B of the whole batch
    axis: int  # the batch axis
    # relative error up to which gradients count as the same; None for what the precision explains
    tolerance: float | None = None

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, with the generators at the same place each time."""
        with same_randomness(self.model.parameters()):
            return self.loss_fn(self.model, batch)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def gradient(self, batch: Any) -> Flat:
        """Return the gradient of the sum of a batch's losses by plain autograd."""
        with same_randomness(self.model.parameters()):
            # Not autograd.grad: reentrant checkpointing accepts a full backward only.
            self.loss_fn(self.model, batch).sum().backward()
        return self.collect()

    def collect(self) -> Flat:
        """Return what lies in ``.grad``, and empty it."""
        parts = []
        for parameter in self.trainable:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((grad.to_dense() if grad.is_sparse else grad).detach().double().flatten().cpu())
            parameter.grad = None
        return torch.cat(parts)


@dataclass(frozen=True)
class Reference:
    """Gradients of all samples, each of its own loss alone."""

    grads: Sequence[Flat]  # one for each sample

    @property
    def norms_B(self) -> Tensor:
        """Norm of every sample's gradient, float64."""
        return torch.stack([grad.norm() for grad in self.grads])

    def bound(self) -> float:
        """Return a clipping norm between the two middle norms: some samples are clipped and some are not."""
        ordered = self.norms_B[self.norms_B.isfinite()].sort().values
        if len(ordered) == 0 or ordered[-1] == 0:
            return 1.0
        middle = len(ordered) // 2
        return float(ordered[max(middle - 1, 0) : middle + 1].mean()) or float(ordered[-1]) / 2

    def clipped_sum(self, max_grad_norm: float) -> Flat:
        """Return the sum of the clipped gradients; a sample that is not finite contributes nothing."""
        coef_B = clip_coefficients(self.norms_B, max_grad_norm)
        total = torch.zeros_like(self.grads[0])
        for grad, coef, norm in zip(self.grads, coef_B, self.norms_B, strict=True):
            if norm.isfinite():
                total += coef * grad
        return total


def relative_error(got: Flat, want: Flat) -> float:
    """Return the relative distance of two gradients."""
    # The norm of `want` is the unit; where both are zero the error is 0.
    distance, unit = float((got - want).norm()), float(want.norm())
    return distance / unit if unit else (0.0 if distance == 0 else float("inf"))
