"""``find_physical_batch``: the largest batch whose private forward and backward fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip._validate import suggests_options
from ghostclip.clipper import GhostClipper
from ghostclip.data.physical_batch_size import find_max_physical_batch_size
from ghostclip.data.physical_batches import count_rows
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.evidence.dependence import same_randomness, taken
from ghostclip.evidence.module_state import restored
from ghostclip.facade.module import clipper_of
from ghostclip.validation.subject import as_loss_fn, plain_batch


@suggests_options
def find_physical_batch(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[..., Tensor] | None = None,
    *,
    upper: int = 4096,
    memory_budget: int | None = None,
    batch_first: bool = True,
) -> int:
    """Find the largest physical batch that fits in memory, by trying sizes on repeated samples of a batch.

    For frameworks that ask for a size in advance; loops of your own need no number: see `ghostclip.PhysicalBatches`
    and ``BatchMemoryManager(max_physical_batch_size="auto")``, which also go on with smaller batches where memory runs
    out all the same. Sizes double, then the gap is halved: on CUDA by what the allocator can give, on the CPU by the
    process's resident set. Nothing is released or counted, and parameters, gradients, buffers and the global generators
    are left as they were.

    Args:
        model: The model on its device, before `make_private` or after.
        batch: At least one sample of the largest shape that will occur: a tensor, tuples, lists or mappings.
        loss: A criterion for batches of inputs and targets, or a function called as ``loss(model, batch)``; None for
            models that compute their own from a dict.
        upper: The largest size that is of use.
        memory_budget: Bytes that it may take on top of what is in use; None for half of the memory available on the
            CPU, and all of the device's on CUDA.
        batch_first: Whether samples lie along axis 0 of the model's inputs (else axis 1).

    Returns:
        The size, from 1 to `upper`; room for the two tensors a parameter that Adam keeps is left.

    Raises:
        DataError: The batch holds no sample.
        InvalidOptionError: Not even one sample fits in the budget, or an option is out of range.

    Example:
        >>> size = ghostclip.find_physical_batch(model, (inputs, targets), nn.CrossEntropyLoss(), upper=64)
    """
    batch = plain_batch(batch)
    loss_fn = as_loss_fn(loss, batch)
    axis = 0 if batch_first else 1
    rows = count_rows(batch, axis=axis)
    if not rows:
        raise DataError("find_physical_batch: the batch holds no sample. Give one or more of the largest shape.")
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise InvalidOptionError(f"model {type(model).__name__}: it has no trainable parameter.")

    with _clipper(model, trainable, batch_first=batch_first) as clipper:

        def step(size: int) -> None:
            samples = [number % rows for number in range(size)]
            try:
                clipper.backward(loss_fn(model, taken(batch, samples, batch_size=rows, axis=axis)))
            finally:
                clipper.reset()

        room = [torch.empty_like(p) for p in trainable for _ in range(2)]
        with restored(model), same_randomness(trainable), torch.enable_grad():
            size = find_max_physical_batch_size(
                step, upper=upper, memory_budget=memory_budget, device=trainable[0].device
            )
        del room
    return size


@contextmanager
def _clipper(model: nn.Module, trainable: list[nn.Parameter], *, batch_first: bool) -> Iterator[GhostClipper]:
    """Yield the clipper of a private model, or one for the time being."""
    # Refused where the model's own has sums that a step has not released.
    try:
        clipper = clipper_of(trainable)
    except InvalidOptionError:
        with GhostClipper(model, max_grad_norm=1.0, batch_first=batch_first) as made:
            yield made
        return
    if clipper.has_clipped_sum:
        raise InvalidOptionError(
            "find_physical_batch: the model has gradients that no step has released. Call it before the training."
        )
    yield clipper
