"""``check``: parity of a private with an ordinary training on one batch, in a report that fits on a screen.

Beside it what a private step costs: time and memory of forward and backward; and ``find_physical_batch``, the largest
batch whose private forward and backward fit in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ghostclip import _torch
from ghostclip._memory import peak_bytes
from ghostclip._validate import suggests_options
from ghostclip.checks.dependence import same_randomness, taken
from ghostclip.checks.module_state import restored
from ghostclip.clipper import GhostClipper, Reduction, Strategy
from ghostclip.data.physical_batches import count_rows, find_max_physical_batch_size
from ghostclip.errors import DataError, GhostClipError, InvalidOptionError
from ghostclip.facade import clipper_of
from ghostclip.validation.validate import (
    LossFn,
    Report,
    as_loss_fn,
    count_samples,
    plain_batch,
    preserved,
    validate,
    without_dropout,
)

# Steps that prove how the model uses its parameters, and make what is made once.
_WARM_UP = 3
_SECONDS = 0.5


@dataclass(frozen=True)
class StepCost:
    """Forward and backward of one batch."""

    seconds: float  # median time
    peak: int | None  # bytes of tensors above what existed before; None where the device offers no measure


def _costs(model: nn.Module, batch: Any, loss_fn: LossFn, make_clipper: Callable[[], GhostClipper]) -> list[StepCost]:
    """Measure ordinary forwards and backwards, and those that end in a clipped sum."""
    # The model has no clipper, before and afterwards, and its gradients are left empty.

    def ordinary() -> None:
        loss_fn(model, batch).mean().backward()
        model.zero_grad(set_to_none=True)

    def private() -> None:
        clipper.backward(loss_fn(model, batch))
        clipper.reset()

    costs = [_cost_of(ordinary, model)]
    with make_clipper() as clipper:
        return [*costs, _cost_of(private, model)]


def _cost_of(step: Callable[[], None], model: nn.Module) -> StepCost:
    device = next(model.parameters()).device
    with same_randomness(model.parameters()):
        for _ in range(_WARM_UP):
            step()
        peak = peak_bytes(step, device)
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        return StepCost(timer.blocked_autorange(min_run_time=_SECONDS).median, peak)


# A copy in float64 may still compute parts in float32, as norms of transformers do.
_TOLERANCE: Final = 1e-5
_NAMED = 4


@dataclass(frozen=True)
class Gradients:
    """Which trainable parameters a batch has gradients for."""

    trainable: int  # how many there are
    numbers: int  # how many numbers they hold
    unused: Sequence[str]  # names of those that the loss does not depend on
    still: Sequence[str]  # names of those whose gradient is exactly zero, also after the others have moved


@dataclass(frozen=True)
class Check:
    """What `check` found.

    Attributes:
        report: Exactness and bound, as `ghostclip.validate` reports them.
        precision: What was compared in, "float64" or the model's own.
        gradients: Which parameters have gradients; None where the model refused to run.
        ordinary: Cost of an ordinary forward and backward; None as well.
        private: Cost of a private one; None as well.
    """

    report: Report
    precision: str
    gradients: Gradients | None = None
    ordinary: StepCost | None = None
    private: StepCost | None = None

    @property
    def ok(self) -> bool:
        """Whether clipped sums are exact, the bound holds, and every trainable parameter has a gradient."""
        idle = self.gradients is not None and (self.gradients.unused or self.gradients.still)
        return self.report.ok and not idle

    def raise_if_bad(self) -> None:
        """Raise what was found.

        Raises:
            UnsupportedModelError: There are problems; the text lists all.
            InvalidOptionError: Parameters have no gradient.
        """
        self.report.raise_if_bad()
        if not self.ok:
            raise InvalidOptionError("\n".join(_gradient_lines(self.gradients)))

    def __str__(self) -> str:
        """Return the report as a page of about fifteen lines."""
        report = self.report
        verdict = "can be trained privately" if report.ok else "CANNOT be trained privately as it is"
        lines = [
            f"{report.model}, {report.batch_size} samples: {verdict}.",
            f"  loss            {report.loss or 'not reached'}",
            *_exactness_lines(self),
            *_gradient_lines(self.gradients),
            *_cost_lines(self.ordinary, self.private),
        ]
        if report.coverage is not None and report.coverage.unchecked:
            lines.append(f"  not checked     {report.coverage.unchecked}")
        for problem in report.problems:
            lines += [f"PROBLEM in {problem.place}", f"  found   {problem.found}"]
            lines += [f"  remedy  {problem.remedy}"] if problem.remedy else []
        return "\n".join([*lines, *(f"Note: {note}" for note in report.notes)])


@suggests_options
def check(  # noqa: PLR0913 - the public function names every choice
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[..., Tensor] | None = None,
    *,
    strategy: Strategy = "auto",
    max_grad_norm: float | None = None,
    loss_reduction: Reduction = "mean",
    batch_first: bool = True,
) -> Check:
    """Compare a private with an ordinary training of a model on one batch, before `make_private`.

    It says on a page:

    - whether the clipped sum is that of one sample at a time, in float64, and how far leaving out one sample moves it
      (as `ghostclip.validate`, which tells more of how each parameter is handled);
    - which trainable parameters have no gradient, now and once the others have moved: noise alone would move them (an
      adapter that is not in use, a head that the loss does not see);
    - time and memory of a private forward and backward beside ordinary ones.

    The model, its gradients, its modes, its hooks and the global generators are left as they were.

    Args:
        model: The model, in the mode it will be trained in, without a clipper.
        batch: 2 to 16 samples that differ: a tensor, or tuples, lists and mappings of tensors.
        loss: A criterion for batches of inputs and targets, or a function called as ``loss(model, batch)``, which
            returns losses of shape ``(B,)`` or a scalar; None for models that compute their own from a dict.
        strategy: The clipping strategy.
        max_grad_norm: C of the comparison; by default a value that clips some of the samples.
        loss_reduction: How a scalar loss is reduced over the samples.
        batch_first: Whether samples lie along axis 0 of the model's inputs (else axis 1).

    Returns:
        The findings; print them.

    Raises:
        DataError: The batch can show nothing.
        InvalidOptionError: The model has no trainable parameter or has a clipper, or the loss does not go with it.

    Example:
        >>> print(ghostclip.check(model, (inputs, targets), nn.CrossEntropyLoss()))
        Sequential, 8 samples: can be trained privately.
        ...
    """
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidOptionError(f"model {type(model).__name__}: it has no trainable parameter.")
    batch = plain_batch(batch)
    loss_fn = as_loss_fn(loss, batch)
    count_samples(batch, axis=0 if batch_first else 1)
    make_clipper = partial(
        GhostClipper, model, max_grad_norm=1.0, strategy=strategy, loss_reduction=loss_reduction,
        batch_first=batch_first,
    )  # fmt: skip
    # Refuses a model that has a clipper, by name.
    make_clipper().remove()
    with preserved(model), torch.enable_grad():
        subject, data, precision = _in_float64(model, batch, loss_fn)
        report = validate(
            subject, data, loss_fn, strategy=strategy, max_grad_norm=max_grad_norm, loss_reduction=loss_reduction,
            batch_first=batch_first, tolerance=_TOLERANCE if precision == "float64" else None,
        )  # fmt: skip
        gradients = _gradients(subject, data, loss_fn) if report.coverage is not None else None
        del subject
        if not report.results:
            return Check(report, precision, gradients)
        return Check(report, precision, gradients, *_costs(model, batch, loss_fn, make_clipper))


def _in_float64(model: nn.Module, batch: Any, loss_fn: LossFn) -> tuple[nn.Module, Any, str]:
    """Return a copy of a model in float64 with a batch to match, or the copy as it is where it takes no such number."""
    # With the precision's name.
    precision = str(next(p.dtype for p in model.parameters() if p.requires_grad)).removeprefix("torch.")
    moved = _torch.tree_map(
        lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, batch
    )
    subject = copy.deepcopy(model)
    try:
        subject = subject.double()
        with torch.no_grad():
            loss = loss_fn(subject, moved)
        if not isinstance(loss, Tensor):
            raise InvalidOptionError(
                f"loss: it returned a {type(loss).__name__}. Return a tensor: losses of shape (B,), or their mean."
            )
    except GhostClipError:
        raise
    except Exception:  # noqa: BLE001 - whatever is in the way of float64, the model's own precision is left
        return copy.deepcopy(model), batch, precision
    return subject, moved, "float64"


def _gradients(subject: nn.Module, batch: Any, loss_fn: LossFn) -> Gradients | None:
    """Find the parameters without a gradient, before and after a step that moves all others."""
    # `subject`: a copy of the model, which is moved. None where the model refuses to run.
    trainable = {name: p for name, p in subject.named_parameters() if p.requires_grad}
    unused, zero = set(trainable), set(trainable)
    with without_dropout(subject):
        for _ in range(2):
            subject.zero_grad(set_to_none=True)
            try:
                loss_fn(subject, batch).sum().backward()
            except (RuntimeError, ValueError, IndexError):
                return None
            grads = {name: p.grad for name, p in trainable.items() if p.grad is not None}
            unused -= grads.keys()
            with torch.no_grad():
                for name, grad in grads.items():
                    dense = grad.to_dense() if grad.is_sparse else grad
                    zero -= {name} if dense.count_nonzero() else set()
                    # The adapters whose other half is zero at first have a gradient once that half has moved.
                    trainable[name].sub_(1e-2 * dense / dense.abs().max().clamp(min=1e-30))
    numbers = sum(p.numel() for p in trainable.values())
    return Gradients(len(trainable), numbers, sorted(unused), sorted(zero - unused))


def _exactness_lines(checked: Check) -> list[str]:
    lines = []
    for result in checked.report.results:
        lines += [
            f"  reference       one sample at a time in {checked.precision}, C = {checked.report.max_grad_norm:.4g}",
            f"  clipped sum     off by {result.error:.1e} ({result.strategy}); norms by {result.norm_error:.1e}",
        ]
        if result.sensitivity is not None:
            lines.append(
                f"  sensitivity     leaving out one sample moves the sum by {result.sensitivity:.4f} C at most"
            )
    return lines


def _gradient_lines(gradients: Gradients | None) -> list[str]:
    if gradients is None:
        return []
    idle = len(gradients.unused) + len(gradients.still)
    having = gradients.trainable - idle
    head = f"  gradients       {having} of {gradients.trainable} trainable parameters have one"
    lines = [f"{head} ({gradients.numbers:,} numbers in all)"]
    for names, what in ((gradients.unused, "not in use"), (gradients.still, "always zero")):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            lines.append(f"  NO GRADIENT     {what}: {', '.join(names[:_NAMED])}{more}")
    if idle:
        lines.append("                  noise alone would move these: freeze them, or let the loss depend on them")
    return lines


def _cost_lines(ordinary: StepCost | None, private: StepCost | None) -> list[str]:
    if ordinary is None or private is None:
        return []
    lines = [f"  ordinary step   {ordinary.seconds * 1e3:.2f} ms{_memory(ordinary)}, forward and backward"]
    times = f"{private.seconds * 1e3:.2f} ms{_memory(private)}"
    ratio = f"{private.seconds / ordinary.seconds:.2f} times the time"
    if ordinary.peak and private.peak:
        ratio += f", {private.peak / ordinary.peak:.2f} times the memory"
    return [*lines, f"  private step    {times}: {ratio}"]


def _memory(cost: StepCost) -> str:
    if cost.peak is None:
        return ""
    size = f"{cost.peak / 2**20:.1f} MiB" if cost.peak >= 2**20 else f"{cost.peak / 2**10:.1f} KiB"
    return f" and {size} on top of the model"


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

    try:
        owned: GhostClipper | None = clipper_of(trainable)
    except InvalidOptionError:
        owned = None
    if owned is not None and owned.has_clipped_sum:
        raise InvalidOptionError(
            "find_physical_batch: the model has gradients that no step has released. Call it before the training."
        )
    made = nullcontext(owned) if owned else GhostClipper(model, max_grad_norm=1.0, batch_first=batch_first)
    with made as clipper:

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
