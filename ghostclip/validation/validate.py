"""``validate``: everything that can be known about a model, a batch and a loss before training."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip._validate import suggests_options
from ghostclip.capture.bags import batch_as_rows
from ghostclip.clipper import GhostClipper, Reduction, Strategy
from ghostclip.errors import GhostClipError, LossReductionError, SampleMixingError
from ghostclip.evidence.dependence import DependenceStart
from ghostclip.planning.coverage import Coverage
from ghostclip.validation import checks
from ghostclip.validation.fixers import ModuleValidator
from ghostclip.validation.gradients import Reference, Subject
from ghostclip.validation.report import Problem, Report, StrategyResult
from ghostclip.validation.samples import count_samples, plain_batch
from ghostclip.validation.state import preserved, without_dropout


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
    with preserved(model), torch.enable_grad():
        return _Validation(subject, batch, strategies, max_grad_norm, loss_reduction).report()


class _Validation:
    """One run of the checks, in an order in which later ones may rely on earlier ones."""

    def __init__(
        self,
        subject: Subject,
        batch: Any,
        strategies: Sequence[Strategy],
        max_grad_norm: float | None,
        reduction: Reduction,
    ) -> None:
        self.subject = subject
        self.batch = batch
        self.strategies = strategies
        self.max_grad_norm = max_grad_norm
        self.reduction: Reduction = reduction
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.results: list[StrategyResult] = []
        self.coverage: Coverage | None = None
        self.per_sample = False

    def report(self) -> Report:
        """Run all checks."""
        for error in ModuleValidator.validate(self.subject.model):
            self.problems.append(Problem.from_error(error, place="model"))
        bound = None
        if self._engine_accepts():
            with ExitStack() as stack:
                stack.enter_context(without_dropout(self.subject.model))
                bound = self._compare()
        return Report(
            model=type(self.subject.model).__name__,
            batch_size=self.subject.batch_size,
            max_grad_norm=bound,
            loss="one for each sample" if self.per_sample else f"a scalar, declared as the {self.reduction}",
            problems=self.problems,
            notes=self.notes,
            results=self.results,
            coverage=self.coverage,
            tolerance=checks.tolerance_of(self.subject),
        )

    def _engine_accepts(self) -> bool:
        """Run the engine once as it would in training; whatever it refuses is a problem with a place."""
        run = self._run(self.strategies[0], 1.0)
        self.coverage, refusal = run.attempt(self.batch)
        if refusal is None:
            return True
        start = checks.find_mixing(self.subject, self.batch) if isinstance(refusal, SampleMixingError) else None
        of_loss = isinstance(refusal, LossReductionError) or str(refusal).startswith("the loss")
        place = "loss_fn" if of_loss else "model"
        problem = _mixing(start) if start is not None else Problem.from_error(refusal, place=place)
        if problem.place not in {known.place for known in self.problems}:
            self.problems.append(problem)
        self.notes.append("The engine refused the batch, so that nothing could be compared with one sample at a time.")
        return False

    def _compare(self) -> float | None:
        """Compare with one sample at a time; returns C."""
        random = checks.is_random(self.subject, self.batch)
        self.per_sample = self._loss_is_per_sample()
        try:
            reference = self._reference(random=random)
        except (RuntimeError, ValueError, IndexError) as error:
            remedy = "Make it work on any number of samples; an average over the batch is not needed per sample."
            text = " ".join(str(error).split())
            self.problems.append(Problem("loss_fn on one sample alone", f"{type(error).__name__}: {text}", remedy))
            return None
        if reference is None:
            return None
        if not random:
            reduction = "none" if self.per_sample else self.reduction
            problem = checks.loss_problem(self.subject, self.batch, reference, reduction=reduction)
            if problem is not None:
                start = checks.find_mixing(self.subject, self.batch)
                self.problems.append(problem if start is None else _mixing(start))
                return None
        bound = self.max_grad_norm or reference.bound()
        parts = (
            [] if random else [(i, checks.without(self.subject, self.batch, i)) for i in checks.left_out(self.subject)]
        )
        for strategy in self.strategies:
            self._compare_strategy(strategy, bound, reference, parts)
        return bound

    def _reference(self, *, random: bool) -> Reference | None:
        if not random:
            return checks.one_by_one(self.subject, self.batch)
        if self.per_sample:
            self.notes.append(
                "The loss draws random numbers besides dropout: gradients were compared within one forward, and no "
                "sample was left out."
            )
            return checks.in_one_graph(self.subject, self.batch)
        self.notes.append(
            "The loss draws random numbers besides dropout and is a scalar: whether it is a sum of the samples' own "
            "losses could not be checked. Return losses of shape (B,) to have it checked."
        )
        return None

    def _compare_strategy(
        self, strategy: Strategy, bound: float, reference: Reference, parts: Sequence[tuple[int, Any]]
    ) -> None:
        try:
            result = self._run(strategy, bound).compare(self.batch, reference, parts)
        except GhostClipError as error:
            self.problems.append(Problem.from_error(error, place=f"strategy '{strategy}'"))
            return
        self.results.append(result)
        tolerance = checks.tolerance_of(self.subject)
        if result.error > tolerance or result.norm_error > tolerance:
            found = f"the clipped sum is off by {result.error:.2g} and norms by {result.norm_error:.2g} (relative)"
            remedy = "This should not happen: please report the model. Meanwhile choose a strategy that is exact here."
            self.problems.append(Problem(f"strategy '{strategy}'", found, remedy))
        if result.sensitivity is not None and result.sensitivity > 1 + tolerance:
            found = f"leaving out one sample moves the clipped sum by {result.sensitivity:.4f} C"
            remedy = "One sample's gradient depends on the others: see the other problems, or freeze what mixes them."
            self.problems.append(Problem(f"strategy '{strategy}'", found, remedy))

    def _loss_is_per_sample(self) -> bool:
        with torch.no_grad():
            return self.subject.loss(self.batch).dim() == 1

    def _run(self, strategy: Strategy, max_grad_norm: float) -> checks.EngineRun:
        return checks.EngineRun(self.subject, strategy=strategy, reduction=self.reduction, max_grad_norm=max_grad_norm)


def _mixing(start: DependenceStart) -> Problem:
    found = f"the output of one sample depends on other samples; it starts in {start.describe()}"
    return Problem(start.place, found, start.remedy())
