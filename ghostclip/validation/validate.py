"""``validate``: everything that can be known about a model, a batch and a loss before training, and its report.

The checks of one batch: what the engine says, whether losses add up, whether clipped sums and bounds hold.

Batches may have any form, and loss functions be as users have them; a model is left as it was. The slow twin are
gradients by plain autograd, of one sample or of some, without the engine.

Shape letter: B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip._validate import suggests_options
from ghostclip.capture.inputs import batch_as_rows
from ghostclip.checks.batches import Randomness
from ghostclip.checks.dependence import DependenceStart, batch_axis_of, dependence_start, same_randomness, taken
from ghostclip.checks.module_state import restored
from ghostclip.clipper import GhostClipper, Reduction, Strategy
from ghostclip.clipping.bounds import clip_coefficients
from ghostclip.clipping.coverage import Coverage
from ghostclip.errors import (
    DataError,
    GhostClipError,
    InvalidOptionError,
    LossReductionError,
    SampleMixingError,
    UnsupportedModelError,
)
from ghostclip.validation.fixers import ModuleValidator


def plain_batch(batch: Any) -> Any:
    """Return a batch with other mappings (such as those of tokenizers) made dictionaries, inside others as well."""
    if isinstance(batch, Mapping):
        return {key: plain_batch(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(plain_batch(item) for item in batch)
    return batch


def count_samples(batch: Any, *, axis: int) -> int:
    """Return the number of samples of a batch, which its first tensor with a batch axis tells."""
    # At least 2. Refused where no tensor tells, and where all samples are the same, as a single one is.
    tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise DataError(
            "validate: the batch holds no tensor with a batch axis. Give a tensor, a tuple, a list or a dict."
        )
    first = tensors[0]
    size = first.shape[axis if axis < first.dim() else 0]
    if all(_are_all_alike(tensor, size=size, axis=axis) for tensor in tensors):
        raise DataError(
            f"validate: the batch has {size} sample(s), all the same, so that replacing one by another shows nothing. "
            "Give 2 to 16 samples that differ."
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


@dataclass(frozen=True)
class Problem:
    """Something that has to change before the model can be trained privately."""

    place: str  # where it is: a module's path and type, ``"loss_fn"`` or a strategy
    found: str  # what was found there
    remedy: str  # what can be done

    @classmethod
    def from_error(cls, error: Exception, *, place: str) -> Problem:
        """Take an error's text apart: the place before the first colon, the remedy in the last sentence."""
        # `place`: where it was raised, for a text that names no module.
        text = " ".join(str(error).split()) or type(error).__name__
        head, colon, rest = text.partition(": ")
        if colon and head.endswith(")") and " (" in head and len(head.split()) == 2:
            place, text = head, rest
        finding, _, remedy = text.rpartition(". ")
        return cls(place, finding or text, remedy if finding else "")

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.place}: {self.found.rstrip('.')}." + (f" {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class StrategyResult:
    """How one strategy did on the batch.

    Attributes:
        strategy: The strategy that ran.
        error: Relative error of the clipped sum against one sample at a time.
        norm_error: Largest relative error of a sample's gradient norm.
        sensitivity: Farthest that leaving out one sample moved the clipped sum, in units of C; None where that was not
            measured.
    """

    strategy: str
    error: float
    norm_error: float
    sensitivity: float | None


@dataclass
class Report:
    """The evidence on one model, batch and loss.

    Attributes:
        model: The model's class name.
        batch_size: B.
        max_grad_norm: C of the comparison; None where none was made.
        loss: What the loss function returned, in words.
        problems: What has to change; empty if nothing.
        notes: What was not, or not fully, checked, and why.
        results: How each strategy did.
        coverage: How every parameter is handled, as far as the engine came.
        tolerance: Up to what relative error a clipped sum counts as exact in the model's precision.
    """

    model: str
    batch_size: int
    max_grad_norm: float | None = None
    loss: str = ""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    results: list[StrategyResult] = field(default_factory=list)
    coverage: Coverage | None = None
    tolerance: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the model can be trained privately with this loss, as far as this batch shows."""
        return not self.problems

    def raise_if_bad(self) -> None:
        """Raise what was found.

        Raises:
            UnsupportedModelError: There are problems; the text lists all.
        """
        if self.problems:
            raise UnsupportedModelError("\n".join(map(str, self.problems)))

    def __str__(self) -> str:
        """Return the report as a page of text."""
        verdict = "can be trained privately" if self.ok else "cannot be trained privately as it is"
        lines = [f"{self.model}, {self.batch_size} samples: {verdict}."]
        if self.loss:
            lines.append(f"Loss: {self.loss}.")
        for problem in self.problems:
            lines += ["", f"PROBLEM in {problem.place}", f"  found:  {problem.found}"]
            lines += [f"  remedy: {problem.remedy}"] if problem.remedy else []
        if self.results:
            lines += [
                "",
                f"Against one sample at a time (C = {self.max_grad_norm:.4g}, exact up to {self.tolerance:g}):",
            ]
            lines += [_line(result) for result in self.results]
        lines += [""] * bool(self.notes) + [f"Note: {note}" for note in self.notes]
        if self.coverage is not None:
            lines += ["", str(self.coverage)]
        return "\n".join(lines)


def _line(result: StrategyResult) -> str:
    moved = "" if result.sensitivity is None else f", leaving out one sample moves it by {result.sensitivity:.4f} C"
    return f"  {result.strategy}: clipped sum off by {result.error:.1e}, norms by {result.norm_error:.1e}{moved}"


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
    """Return the batch without one sample."""
    others = [other for other in range(subject.batch_size) if other != sample]
    return taken(batch, others, batch_size=subject.batch_size, axis=subject.axis)


def find_mixing(subject: Subject, batch: Any) -> DependenceStart | None:
    """Find where the model starts to mix samples, from its modules' outputs."""
    with torch.no_grad():
        return dependence_start(
            subject.model,
            lambda moved: subject.loss_fn(subject.model, moved),
            batch,
            batch_size=subject.batch_size,
            axis=subject.axis,
        )


def is_random(subject: Subject, batch: Any) -> bool:
    """Say whether the loss changes from call to call although everything else is the same."""
    with torch.no_grad(), same_randomness(subject.model.parameters()):
        values = [subject.loss_fn(subject.model, batch).detach().double() for _ in range(3)]
    return not all(torch.allclose(value, values[0], rtol=1e-6, equal_nan=True) for value in values)


def loss_problem(subject: Subject, batch: Any, reference: Reference, *, reduction: str) -> Problem | None:
    """Check that the loss of a batch, and of its parts, is the sum (or mean) of its samples' own losses."""
    # `reduction`: what was declared for a scalar, "mean" or "sum"; "none" for losses of shape (B,). None where all
    # gradients add up.
    tolerance = tolerance_of(subject)
    total = torch.stack(list(reference.grads)).sum(0)
    scale = subject.batch_size if reduction == "mean" else 1
    whole = subject.gradient(batch)
    if relative_error(whole * scale, total) > tolerance:
        other = "sum" if reduction == "mean" else "mean"
        other_scale = 1 if reduction == "mean" else subject.batch_size
        if reduction != "none" and relative_error(whole * other_scale, total) <= tolerance:
            finding = f"the loss is the {other} over the samples, but loss_reduction={reduction!r} was declared"
            return Problem("loss_fn", finding, f"Pass loss_reduction={other!r}, or return losses of shape (B,).")
        return _does_not_add_up(relative_error(whole * scale, total), "the batch")
    for sample in left_out(subject):
        rest = subject.gradient(without(subject, batch, sample)) * (scale - 1 if scale > 1 else 1)
        error = relative_error(rest, total - reference.grads[sample])
        if error > tolerance:
            return _does_not_add_up(error, f"the batch without sample {sample}")
    return None


def _does_not_add_up(error: float, what: str) -> Problem:
    finding = (
        f"the gradient of {what} is not that of its samples' own losses (relative difference {error:.2g}): the loss "
        "compares samples, normalises over the batch (a mean over all tokens), or leaves some out"
    )
    remedy = (
        "Write each sample's loss from its own outputs and return them as (B,): reduction='none', then a mean over "
        "each sample's own positions."
    )
    return Problem("loss_fn", finding, remedy)


@suggests_options
def validate(  # noqa: PLR0913 - the public function names every choice
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    strategy: Strategy | Sequence[Strategy] = "auto",
    max_grad_norm: float | None = None,
    loss_reduction: Reduction = "mean",
    batch_first: bool = True,
    tolerance: float | None = None,
) -> Report:
    """Check on one batch that a model can be trained privately with a loss, and that the clipped sums are exact.

    It proves, or says where it fails and what to do:

    - No module mixes samples; if one does, which is the first (batch statistics, attention across the batch).
    - The loss is the sum or mean of each sample's own loss: gradients of the batch, of the batch without each sample
      and of each sample alone agree. A clipper cannot see this of a scalar in training.
    - Every parameter's gradient is clipped per sample, equal to one sample at a time, and leaving out one sample moves
      the clipped sum by at most C.

    The model, its gradients, its modes and the global generators are left as they were.

    Args:
        model: The model, in the mode it will be trained in, without a clipper.
        batch: 2 to 16 samples that differ: a tensor, or tuples, lists and mappings of tensors. Tensors whose batch
            axis (or else axis 0) has as many entries as the first one has are taken to hold one for each sample. Of
            flat ids with the offsets of bags, as ``nn.EmbeddingBag`` takes them, a bag is a sample.
        loss_fn: Called as ``loss_fn(model, batch)``, also on single samples; returns losses of shape ``(B,)``, or a
            scalar. It should call the model once or more, and draw no data of its own.
        strategy: One strategy to compare, or several.
        max_grad_norm: C; by default a value that clips some of the samples.
        loss_reduction: How a scalar loss was reduced over the samples.
        batch_first: Whether samples lie along axis 0 of the model's inputs (else axis 1).
        tolerance: Up to what relative error a gradient counts as the same; by default what the coarsest precision among
            the trainable parameters explains.

    Returns:
        The report. Wrong arguments, a batch that can show nothing (``DataError``) and a model that has a clipper
        already raise instead.

    Example:
        >>> report = ghostclip.validate(model, (x, y), lambda model, batch: criterion(model(batch[0]), batch[1]))
        >>> print(report)
        Sequential, 8 samples: can be trained privately.
        ...
        >>> report.raise_if_bad()
    """
    batch, loss_fn = batch_as_rows(model, plain_batch(batch), loss_fn)
    axis = 0 if batch_first else 1
    subject = Subject(model, loss_fn, count_samples(batch, axis=axis), axis, tolerance)
    strategies: list[Strategy] = [strategy] if isinstance(strategy, str) else list(strategy)
    for name in strategies:
        GhostClipper(model, max_grad_norm=max_grad_norm or 1.0, strategy=name, loss_reduction=loss_reduction).remove()
    report = Report(type(model).__name__, subject.batch_size, tolerance=tolerance_of(subject))
    with preserved(model), torch.enable_grad():
        _Validation(subject, batch, strategies, loss_reduction, report).run(max_grad_norm)
    return report


@dataclass
class _Validation:
    """One run of the checks, in an order in which later ones may rely on earlier ones."""

    subject: Subject
    batch: Any
    strategies: Sequence[Strategy]
    reduction: Reduction
    report: Report

    def run(self, max_grad_norm: float | None) -> None:
        """Run all checks, and put down in the report what they find."""
        self.report.loss = f"a scalar, declared as the {self.reduction}"
        for error in ModuleValidator.validate(self.subject.model):
            self.report.problems.append(Problem.from_error(error, place="model"))
        if self._engine_accepts():
            with without_dropout(self.subject.model):
                self.report.max_grad_norm = self._compare(max_grad_norm)

    def _engine_accepts(self) -> bool:
        """Run the engine once as it would in training; whatever it refuses is a problem with a place."""
        refusal: GhostClipError | None = None
        with self._clipper(self.strategies[0], 1.0) as clipper:
            try:
                self._step(clipper, self.batch)
            except GhostClipError as error:
                refusal = error
            finally:
                clipper.reset()
            self.report.coverage = clipper.coverage()
        if refusal is None:
            return True
        start = find_mixing(self.subject, self.batch) if isinstance(refusal, SampleMixingError) else None
        of_loss = isinstance(refusal, LossReductionError) or str(refusal).startswith("the loss")
        place = "loss_fn" if of_loss else "model"
        problem = _mixing(start) if start is not None else Problem.from_error(refusal, place=place)
        if problem.place not in {known.place for known in self.report.problems}:
            self.report.problems.append(problem)
        note = "The engine refused the batch, so that nothing could be compared with one sample at a time."
        self.report.notes.append(note)
        return False

    def _compare(self, max_grad_norm: float | None) -> float | None:
        """Compare with one sample at a time; returns C."""
        random = is_random(self.subject, self.batch)
        with torch.no_grad():
            per_sample = self.subject.loss(self.batch).dim() == 1
        if per_sample:
            self.report.loss = "one for each sample"
        try:
            reference = self._reference(random=random, per_sample=per_sample)
        except (RuntimeError, ValueError, IndexError) as error:
            remedy = "Make it work on any number of samples; an average over the batch is not needed per sample."
            text = " ".join(str(error).split())
            self.report.problems.append(
                Problem("loss_fn on one sample alone", f"{type(error).__name__}: {text}", remedy)
            )
            return None
        if reference is None:
            return None
        if not random:
            reduction = "none" if per_sample else self.reduction
            problem = loss_problem(self.subject, self.batch, reference, reduction=reduction)
            if problem is not None:
                start = find_mixing(self.subject, self.batch)
                self.report.problems.append(problem if start is None else _mixing(start))
                return None
        bound = max_grad_norm or reference.bound()
        parts = [] if random else [(i, without(self.subject, self.batch, i)) for i in left_out(self.subject)]
        for strategy in self.strategies:
            self._compare_strategy(strategy, bound, reference, parts)
        return bound

    def _reference(self, *, random: bool, per_sample: bool) -> Reference | None:
        """Differentiate every sample's loss, alone or, where random numbers are drawn, of one forward."""
        subject, grads = self.subject, []
        if not random:
            for sample in range(subject.batch_size):
                single = taken(self.batch, [sample], batch_size=subject.batch_size, axis=subject.axis)
                grads.append(subject.gradient(single))
            return Reference(grads)
        if per_sample:
            self.report.notes.append(
                "The loss draws random numbers besides dropout: gradients were compared within one forward, and no "
                "sample was left out."
            )
            for sample in range(subject.batch_size):
                subject.loss(self.batch)[sample].backward()
                grads.append(subject.collect())
            return Reference(grads)
        self.report.notes.append(
            "The loss draws random numbers besides dropout and is a scalar: whether it is a sum of the samples' own "
            "losses could not be checked. Return losses of shape (B,) to have it checked."
        )
        return None

    def _compare_strategy(
        self, strategy: Strategy, bound: float, reference: Reference, parts: Sequence[tuple[int, Any]]
    ) -> None:
        try:
            result = self._compared(strategy, bound, reference, parts)
        except GhostClipError as error:
            self.report.problems.append(Problem.from_error(error, place=f"strategy '{strategy}'"))
            return
        self.report.results.append(result)
        tolerance = tolerance_of(self.subject)
        if result.error > tolerance or result.norm_error > tolerance:
            finding = f"the clipped sum is off by {result.error:.2g} and norms by {result.norm_error:.2g} (relative)"
            remedy = "This should not happen: please report the model. Meanwhile choose a strategy that is exact here."
            self.report.problems.append(Problem(f"strategy '{strategy}'", finding, remedy))
        if result.sensitivity is not None and result.sensitivity > 1 + tolerance:
            finding = f"leaving out one sample moves the clipped sum by {result.sensitivity:.4f} C"
            remedy = "One sample's gradient depends on the others: see the other problems, or freeze what mixes them."
            self.report.problems.append(Problem(f"strategy '{strategy}'", finding, remedy))

    def _compared(
        self, strategy: Strategy, bound: float, reference: Reference, parts: Sequence[tuple[int, Any]]
    ) -> StrategyResult:
        """Compare the clipped sum with the reference, and leave samples out."""
        # `parts`: samples, and the batch without each of them.
        with self._clipper(strategy, bound) as clipper:
            # What a clipper asks of its first forward may draw random numbers.
            self._step(clipper, self.batch)
            whole = self._step(clipper, self.batch)
            norms_B = clipper.per_sample_norms.double().cpu()
            resolved = clipper.resolve_strategy()
            moved = [float((whole - self._step(clipper, rest)).norm()) / bound for _, rest in parts]
        finite_B = reference.norms_B.isfinite() & (reference.norms_B > 0)
        apart_B = ((norms_B - reference.norms_B).abs() / reference.norms_B)[finite_B]
        return StrategyResult(
            resolved,
            relative_error(whole, reference.clipped_sum(bound)),
            float(apart_B.max()) if apart_B.numel() else 0.0,
            max(moved, default=None),
        )

    def _clipper(self, strategy: Strategy, max_grad_norm: float) -> GhostClipper:
        return GhostClipper(
            self.subject.model,
            max_grad_norm=max_grad_norm,
            strategy=strategy,
            loss_reduction=self.reduction,
            batch_first=self.subject.axis == 0,
        )

    def _step(self, clipper: GhostClipper, batch: Any) -> Flat:
        with same_randomness(self.subject.model.parameters()):
            clipper.backward(self.subject.loss_fn(self.subject.model, batch))
        total = self.subject.collect()
        clipper.reset()
        return total


def _mixing(start: DependenceStart) -> Problem:
    finding = f"the output of one sample depends on other samples; it starts in {start.describe()}"
    return Problem(start.place, finding, start.remedy())
