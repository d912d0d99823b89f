"""The checks of one batch: what the engine says, whether losses add up, whether clipped sums and bounds hold."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip.clipper import GhostClipper, Reduction, Strategy
from ghostclip.errors import GhostClipError
from ghostclip.evidence.dependence import DependenceStart, dependence_start, same_randomness
from ghostclip.planning.coverage import Coverage
from ghostclip.validation.gradients import Flat, Reference, Subject, relative_error
from ghostclip.validation.report import Problem, StrategyResult
from ghostclip.validation.samples import take

# Up to this relative error a gradient counts as the same: what another order of summation makes of it, with a margin.
TOLERANCE: Final = {torch.float64: 1e-8, torch.float32: 1e-3}
_COARSE: Final = 5e-2
# Samples that are left out in turn.
_MAX_LEFT_OUT: Final = 8


def tolerance_of(subject: Subject) -> float:
    """Return the relative error up to which gradients count as the same."""
    if subject.tolerance is not None:
        return subject.tolerance
    return max(TOLERANCE.get(parameter.dtype, _COARSE) for parameter in subject.trainable)


def left_out(subject: Subject) -> list[int]:
    """Return the samples to leave out: all of a small batch, else the first few."""
    return list(range(min(subject.batch_size, _MAX_LEFT_OUT)))


def without(subject: Subject, batch: Any, sample: int) -> Any:
    """Return the batch without one sample.

    Args:
        subject: What is checked.
        batch: The batch.
        sample: The sample.

    Returns:
        A batch of B - 1 samples.
    """
    others = [other for other in range(subject.batch_size) if other != sample]
    return take(batch, others, batch_size=subject.batch_size, axis=subject.axis)


def find_mixing(subject: Subject, batch: Any) -> DependenceStart | None:
    """Find where the model starts to mix samples, from its modules' outputs.

    Args:
        subject: What is checked.
        batch: The batch.

    Returns:
        The place, or None.
    """
    with torch.no_grad():
        return dependence_start(
            subject.model,
            lambda moved: subject.loss_fn(subject.model, moved),
            batch,
            batch_size=subject.batch_size,
            axis=subject.axis,
        )


def is_random(subject: Subject, batch: Any) -> bool:
    """Say whether the loss changes from call to call although everything else is the same.

    Args:
        subject: What is checked.
        batch: The batch.

    Returns:
        True where random numbers enter it.
    """
    with torch.no_grad(), same_randomness(subject.model.parameters()):
        values = [subject.loss_fn(subject.model, batch).detach().double() for _ in range(3)]
    return not all(torch.allclose(value, values[0], rtol=1e-6, equal_nan=True) for value in values)


def in_one_graph(subject: Subject, batch: Any) -> Reference:
    """Differentiate every sample's loss of one forward, for models that draw random numbers.

    Args:
        subject: What is checked; its loss has shape ``(B,)``.
        batch: The batch.

    Returns:
        Gradients for the random numbers of that forward.
    """
    grads = []
    for sample in range(subject.batch_size):
        subject.loss(batch)[sample].backward()
        grads.append(subject.collect())
    return Reference(grads)


def one_by_one(subject: Subject, batch: Any) -> Reference:
    """Differentiate the loss of every sample alone, given to the model as a batch of one.

    Args:
        subject: What is checked.
        batch: The batch.

    Returns:
        The gradients.
    """
    singles = (
        take(batch, [sample], batch_size=subject.batch_size, axis=subject.axis) for sample in range(subject.batch_size)
    )
    return Reference([subject.gradient(single) for single in singles])


def loss_problem(subject: Subject, batch: Any, reference: Reference, *, reduction: str) -> Problem | None:
    """Check that the loss of a batch, and of its parts, is the sum (or mean) of its samples' own losses.

    Args:
        subject: What is checked.
        batch: The batch.
        reference: The samples' own gradients.
        reduction: What was declared for a scalar: ``"mean"`` or ``"sum"``; ``"none"`` for losses of shape (B,).

    Returns:
        What is wrong; None where all gradients add up.
    """
    tolerance = tolerance_of(subject)
    total = torch.stack(list(reference.grads)).sum(0)
    scale = subject.batch_size if reduction == "mean" else 1
    whole = subject.gradient(batch)
    if relative_error(whole * scale, total) > tolerance:
        other = "sum" if reduction == "mean" else "mean"
        other_scale = 1 if reduction == "mean" else subject.batch_size
        if reduction != "none" and relative_error(whole * other_scale, total) <= tolerance:
            found = f"the loss is the {other} over the samples, but loss_reduction={reduction!r} was declared"
            return Problem("loss_fn", found, f"Pass loss_reduction={other!r}, or return losses of shape (B,).")
        return _does_not_add_up(relative_error(whole * scale, total), "the batch")
    for sample in left_out(subject):
        rest = subject.gradient(without(subject, batch, sample)) * (scale - 1 if scale > 1 else 1)
        error = relative_error(rest, total - reference.grads[sample])
        if error > tolerance:
            return _does_not_add_up(error, f"the batch without sample {sample}")
    return None


def _does_not_add_up(error: float, what: str) -> Problem:
    found = (
        f"the gradient of {what} is not that of its samples' own losses (relative difference {error:.2g}): the loss "
        "compares samples, normalises over the batch (a mean over all tokens), or leaves some out"
    )
    remedy = (
        "Write each sample's loss from its own outputs and return them as (B,): reduction='none', then a mean over "
        "each sample's own positions."
    )
    return Problem("loss_fn", found, remedy)


class EngineRun:
    """A clipper at work on a subject."""

    def __init__(self, subject: Subject, *, strategy: Strategy, reduction: Reduction, max_grad_norm: float) -> None:
        """Attach nothing yet.

        Args:
            subject: What is checked.
            strategy: Which way to clip.
            reduction: How a scalar loss is reduced.
            max_grad_norm: C.
        """
        self._subject = subject
        self._max_grad_norm = max_grad_norm
        self._make: Callable[[], GhostClipper] = lambda: GhostClipper(
            subject.model,
            max_grad_norm=max_grad_norm,
            strategy=strategy,
            loss_reduction=reduction,
            batch_first=subject.axis == 0,
        )
        self.strategy: str = strategy

    def attempt(self, batch: Any) -> tuple[Coverage, GhostClipError | None]:
        """Run forward and backward once.

        Args:
            batch: The batch.

        Returns:
            How parameters were handled as far as it came, and why it was refused if it was.
        """
        with self._make() as clipper:
            try:
                self._step(clipper, batch)
            except GhostClipError as error:
                return clipper.coverage(), error
            finally:
                clipper.reset()
            return clipper.coverage(), None

    def compare(self, batch: Any, reference: Reference, parts: Sequence[tuple[int, Any]]) -> StrategyResult:
        """Compare the clipped sum with the reference, and leave samples out.

        Args:
            batch: The batch.
            reference: Every sample's own gradient.
            parts: Samples and the batch without each of them.

        Returns:
            How it did.
        """
        bound = self._max_grad_norm
        with self._make() as clipper:
            # What a clipper asks of its first forward may draw random numbers.
            self._step(clipper, batch)
            whole = self._step(clipper, batch)
            norms_B = clipper.per_sample_norms.double().cpu()
            self.strategy = clipper.resolve_strategy()
            moved = [float((whole - self._step(clipper, rest)).norm()) / bound for _, rest in parts]
        finite_B = reference.norms_B.isfinite() & (reference.norms_B > 0)
        apart_B = ((norms_B - reference.norms_B).abs() / reference.norms_B)[finite_B]
        return StrategyResult(
            self.strategy,
            relative_error(whole, reference.clipped_sum(bound)),
            float(apart_B.max()) if apart_B.numel() else 0.0,
            max(moved, default=None),
        )

    def _step(self, clipper: GhostClipper, batch: Any) -> Flat:
        with same_randomness(self._subject.model.parameters()):
            loss: Tensor = self._subject.loss_fn(self._subject.model, batch)
            clipper.backward(loss)
        total = self._subject.collect()
        clipper.reset()
        return total
