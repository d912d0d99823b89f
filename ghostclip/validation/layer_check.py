"""Check a layer of your own: per-sample gradients, norms and clipped sums against one sample at a time, every strategy.

The names are Opacus's where the things are the same. Whoever registers a rule or a sampler (``register_rule``,
``register_grad_sampler``) tests it here in one line.

Shape letters: B samples, ``*P`` a parameter's own shape.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from ghostclip import _tree
from ghostclip._validate import options_of, takes
from ghostclip.capture.opaque_modules import uncompared
from ghostclip.clipper import GhostClipper
from ghostclip.clipping.bounds import clip_coefficients
from ghostclip.errors import DataError, GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.facade import strategy_of

STRATEGIES: Final = ("bookkeeping", "ghost", "fast", "hooks")
REDUCTIONS: Final = ("mean", "sum")
# Relative tolerances by dtype; 16-bit formats round every product to 3 or 2 digits.
RTOL: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}

Inputs = Tensor | PackedSequence | tuple[Any, ...] | list[Any]


@dataclass(frozen=True)
class Comparison:
    """One quantity of one strategy against the reference.

    Attributes:
        strategy: The strategy.
        loss_reduction: The loss's reduction over the samples.
        what: ``"per-sample gradient of NAME"``, ``"clipped sum of NAME"``, ``"norms"``, or why nothing was computed.
        error: Largest absolute difference; infinite where shapes differ or the engine refused.
        allowed: The largest difference that rounding explains.
    """

    strategy: str
    loss_reduction: str
    what: str
    error: float
    allowed: float

    @property
    def correct(self) -> bool:
        """Whether the difference is allowed (a NaN is not)."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class LayerReport:
    """Every comparison of a check; ``str()`` gives the table.

    Attributes:
        rows: The comparisons.
    """

    rows: tuple[Comparison, ...]

    @property
    def correct(self) -> bool:
        """Whether every difference is allowed."""
        return all(row.correct for row in self.rows)

    def __str__(self) -> str:
        """Return the comparisons, wrong ones first."""
        ordered = sorted(self.rows, key=lambda row: row.correct)
        lines = [
            f"{'ok   ' if row.correct else 'WRONG'} {row.strategy:11} {row.loss_reduction:4} "
            f"error {row.error:.2e} (allowed {row.allowed:.2e})  {row.what}"
            for row in ordered
        ]
        wrong = sum(not row.correct for row in self.rows)
        return "\n".join([f"{wrong} of {len(lines)} comparisons with one sample at a time are wrong:", *lines])


def is_batch_empty(batch: Inputs) -> bool:
    """Return whether a batch holds no sample."""
    first = next((leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor)), None)
    return first is None or first.numel() == 0


def per_sample_gradient_report(  # noqa: PLR0913 - the public function names every choice
    x: Inputs,
    module: nn.Module,
    *,
    batch_first: bool = True,
    strategy: str | Sequence[str] | None = None,
    loss_reduction: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> LayerReport:
    """Compare and say by how much everything differs; see ``check_per_sample_gradients_are_correct``.

    Args:
        x: A batch: a tensor, a packed sequence, or a tuple of the module's positional inputs.
        module: The module.
        batch_first: Whether the samples lie along axis 0 of inputs and outputs, as against axis 1.
        strategy: One strategy or several; None for all.
        loss_reduction: ``"mean"`` or ``"sum"``; None for both.
        rtol: Allowed difference relative to each tensor's largest entry; None for the dtype's.
        atol: Allowed difference whatever the size of the entries; None for ``rtol`` of the largest gradient of all.

    Returns:
        The report. A strategy in which the engine refuses the module has a row that says why.
    """
    strategies = _chosen(strategy, STRATEGIES, "strategy")
    reductions = _chosen(loss_reduction, REDUCTIONS, "loss_reduction")
    wanted = compute_microbatch_grad_sample(x, module, batch_first=batch_first)
    largest = max((float(grad.abs().max()) for grad in wanted.values() if grad.numel()), default=0.0)
    dtype = next(iter(wanted.values())).dtype
    relative = RTOL.get(dtype, 1e-4) if rtol is None else rtol
    absolute = relative * largest if atol is None else atol
    rows: list[Comparison] = []
    for name, reduction in product(strategies, reductions):
        run = _Run(module, batch_first=batch_first, strategy=name, loss_reduction=reduction)
        with uncompared():
            rows += run.compared(x, wanted, relative, absolute)
    return LayerReport(tuple(rows))


@takes(*options_of(per_sample_gradient_report, "batch_first", "strategy", "loss_reduction", "rtol", "atol"))
def check_per_sample_gradients_are_correct(
    x: Inputs,
    module: nn.Module,
    *,
    raise_if_wrong: bool = False,
    grad_sample_mode: str | None = None,
    options: dict[str, Any],
) -> bool:
    """Return whether a module's per-sample gradients, their norms and clipped sums are right in every strategy.

    The loss of a sample is a fixed smooth function of all the module's floating outputs. The module itself is left as
    it is: copies are run.

    Example:
        >>> check_per_sample_gradients_are_correct(torch.randn(4, 7, 5), nn.Linear(5, 3))
        True

    Args:
        x: A batch: a tensor, a packed sequence, or a tuple of the module's positional inputs.
        module: The module.
        raise_if_wrong: Raise instead of returning False.
        grad_sample_mode: Opacus's name for one strategy, in place of ``strategy``.
        options: As for ``per_sample_gradient_report``: ``batch_first``, ``strategy``, ``loss_reduction``, ``rtol``,
            ``atol``.

    Returns:
        Whether all comparisons hold.

    Raises:
        InvalidOptionError: An option is unknown, or both names of the strategy are given.
        UnsupportedModelError: Something is wrong and ``raise_if_wrong`` is set; the message is the report.
    """
    if grad_sample_mode is not None:
        if (strategy := options["strategy"]) is not None:
            message = f"strategy={strategy!r} and grad_sample_mode={grad_sample_mode!r} are the same; give one."
            raise InvalidOptionError(message)
        options["strategy"] = strategy_of(grad_sample_mode)
    report = per_sample_gradient_report(x, module, **options)
    if raise_if_wrong and not report.correct:
        raise UnsupportedModelError(f"{type(module).__name__}: {report}")
    return report.correct


def compute_microbatch_grad_sample(
    x: Inputs,
    module: nn.Module,
    batch_first: bool = True,  # noqa: FBT001, FBT002 - Opacus's signature
    loss_reduction: str = "mean",
    chunk_method: Callable[[Any], Iterator[Any]] = iter,
) -> dict[str, Tensor]:
    """Return per-sample gradients by running one sample after the other: slow, and right by construction.

    Args:
        x: A batch, see ``check_per_sample_gradients_are_correct``.
        module: The module; a copy is run.
        batch_first: Whether the samples lie along axis 0.
        loss_reduction: Of no effect: of one sample a mean and a sum are the same.
        chunk_method: Yields the batch's samples as batches of one; `iter` stands for rows along the batch axis.

    Returns:
        For every trainable parameter its gradients, shape ``(B, *P)``, samples first in any case.

    Raises:
        DataError: The batch is empty.
        InvalidOptionError: The module has no trainable parameter, or gives another output each time.
    """
    if is_batch_empty(x):
        raise DataError("there is no sample to compute a gradient of. Give a batch of at least one sample.")
    module = copy.deepcopy(module)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise InvalidOptionError(f"{type(module).__name__} has no trainable parameter.")
    collected: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for sample in _samples(x, batch_first=batch_first) if chunk_method is iter else chunk_method(x):
        losses = _losses(_call(module, sample), batch_first=batch_first)
        again = _losses(_call(module, sample), batch_first=batch_first)
        if not torch.equal(losses.detach().nan_to_num(), again.detach().nan_to_num()):
            message = f"{type(module).__name__} gives another output each time (dropout?). Call its eval() first."
            raise InvalidOptionError(message)
        grads = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True, materialize_grads=True)
        for name, grad in zip(parameters, grads, strict=True):
            collected[name].append(grad.to_dense() if grad.is_sparse else grad)
    return {name: torch.stack(grads) for name, grads in collected.items()}


def compute_grad_sample(
    x: Inputs,
    module: nn.Module,
    batch_first: bool = True,  # noqa: FBT001, FBT002 - Opacus's signature
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> dict[str, Tensor]:
    """Return per-sample gradients as the engine forms them with the strategy ``"hooks"``.

    Args:
        x: A batch, see ``check_per_sample_gradients_are_correct``.
        module: The module; a copy is run.
        batch_first: Whether the samples lie along axis 0.
        loss_reduction: The loss's reduction over the samples, ``"mean"`` or ``"sum"``.
        grad_sample_mode: ``"hooks"``, or another of Opacus's names for it.

    Returns:
        For every trainable parameter its gradients of the samples' own losses, shape ``(B, *P)``.

    Raises:
        InvalidOptionError: The mode forms no per-sample gradients.
    """
    if strategy_of(grad_sample_mode) != "hooks":
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: forms no per-sample gradients; use 'hooks'.")
    (reduction,) = _chosen(loss_reduction, REDUCTIONS, "loss_reduction")
    run = _Run(module, batch_first=batch_first, strategy="hooks", loss_reduction=reduction)
    run.backward(x, 1.0).remove()
    return run.grad_samples


class _Run:
    """One strategy on a copy of the module."""

    def __init__(self, module: nn.Module, *, batch_first: bool, strategy: str, loss_reduction: str) -> None:
        self.module = copy.deepcopy(module)
        self.module.zero_grad(set_to_none=True)
        self.batch_first, self.strategy, self.loss_reduction = batch_first, strategy, loss_reduction
        self.grad_samples: dict[str, Tensor] = {}

    def backward(self, x: Inputs, max_grad_norm: float) -> GhostClipper:
        clipper = GhostClipper(
            self.module,
            max_grad_norm=max_grad_norm,
            strategy=self.strategy,  # type: ignore[arg-type]
            loss_reduction=self.loss_reduction,  # type: ignore[arg-type]
            batch_first=self.batch_first,
        )
        losses = _losses(_call(self.module, x), batch_first=self.batch_first)
        clipper.backward(losses.mean() if self.loss_reduction == "mean" else losses.sum())
        for name, parameter in self.module.named_parameters():
            if getattr(parameter, "grad_sample", None) is not None:
                self.grad_samples[name] = parameter.grad_sample  # type: ignore[attr-defined]
        return clipper

    def compared(self, x: Inputs, wanted: Mapping[str, Tensor], relative: float, absolute: float) -> list[Comparison]:
        row = partial(Comparison, self.strategy, self.loss_reduction)

        def difference(what: str, actual: Tensor | None, wanted: Tensor) -> Comparison:
            actual = torch.zeros_like(wanted) if actual is None else actual.detach()
            if actual.shape != wanted.shape:
                return row(f"{what}: shape {tuple(actual.shape)} instead of {tuple(wanted.shape)}", math.inf, 0.0)
            off, size = actual.double() - wanted.double(), float(wanted.abs().max()) if wanted.numel() else 0.0
            return row(what, float(off.abs().max()) if off.numel() else 0.0, absolute + relative * size)

        flat = torch.cat([grad.flatten(1).double() for grad in wanted.values()], 1)
        norms_B = flat.norm(dim=1)
        bound = max(float(norms_B.median()), 1e-12)
        try:
            clipper = self.backward(x, bound)
        except GhostClipError as error:
            return [row(f"refused: {error}", math.inf, 0.0)]
        rows = [difference("norms", clipper.per_sample_norms, norms_B)]
        coef_B = clip_coefficients(norms_B, bound)
        parameters = dict(self.module.named_parameters())
        for name, grads in wanted.items():
            clipped = torch.einsum("b,b...->...", coef_B, grads.double())
            rows.append(difference(f"clipped sum of {name}", parameters[name].grad, clipped))
            if self.strategy == "hooks":
                rows.append(difference(f"per-sample gradient of {name}", self.grad_samples.get(name), grads))
        clipper.remove()
        return rows


def _chosen(requested: str | Sequence[str] | None, known: Sequence[str], option: str) -> list[str]:
    chosen = list(known) if requested is None else [requested] if isinstance(requested, str) else list(requested)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise InvalidOptionError(f"{option}={requested!r} is not known. Choose from {', '.join(known)}.")
    return chosen


def _call(module: nn.Module, x: Inputs) -> Any:
    return module(*x) if isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence) else module(x)


def _samples(x: Inputs, *, batch_first: bool) -> Iterator[Any]:
    """Yield batches of one sample."""
    if isinstance(x, PackedSequence):
        padded_BT, lengths = pad_packed_sequence(x, batch_first=True)
        for sequence, length in zip(padded_BT, lengths.tolist(), strict=True):
            yield pack_sequence([sequence[:length]])
        return
    items = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    axes = [_axis(item, batch_first=batch_first) if isinstance(item, Tensor) else None for item in items]
    sizes = {item.shape[axis] for item, axis in zip(items, axes, strict=True) if axis is not None}
    if len(sizes) != 1:
        message = f"the inputs hold {sorted(sizes)} samples. Give every input one row per sample along the batch axis."
        raise DataError(message)
    for sample in range(sizes.pop()):
        yield tuple(
            item if axis is None else item.narrow(axis, sample, 1) for item, axis in zip(items, axes, strict=True)
        )


def _axis(item: Tensor, *, batch_first: bool) -> int | None:
    if item.dim() == 0:
        return None
    return 0 if batch_first or item.dim() == 1 else 1


def _losses(output: Any, *, batch_first: bool) -> Tensor:
    """Return a smooth loss of every sample, shape ``(B,)``, that no symmetry of a layer makes constant."""
    if isinstance(output, PackedSequence):
        padded_BT, lengths = pad_packed_sequence(output, batch_first=True)
        real = torch.arange(padded_BT.shape[1]) < lengths.unsqueeze(1)
        return _smooth(padded_BT * real.to(padded_BT).view(*real.shape, *[1] * (padded_BT.dim() - 2)))
    if isinstance(output, tuple) and output and isinstance(output[0], PackedSequence):
        return _losses(output[0], batch_first=batch_first)
    items = [item for item in _tree.leaves(output) if isinstance(item, Tensor) and item.requires_grad and item.dim()]
    parts = [_smooth(item.movedim(_axis(item, batch_first=batch_first) or 0, 0)) for item in items]
    if not parts:
        raise InvalidOptionError("the module returns no floating tensor that its parameters take part in.")
    return torch.stack(parts).sum(0)


def _smooth(output: Tensor) -> Tensor:
    flat = output.flatten(1) if output.dim() > 1 else output.unsqueeze(1)
    wave = torch.cos(torch.arange(flat.shape[1], device=flat.device)).to(flat.dtype)
    return (flat * wave + 0.5 * flat.square()).sum(1)
