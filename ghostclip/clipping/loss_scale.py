"""The scale of a scalar loss: which factor lies between the samples' terms and the scalar, and whom it depends on.

A mean over samples divides every term by B, which clipping undoes; a sum does not. Whatever else is multiplied must be
a public constant: a factor that comes from other samples (their lengths, their number) makes each sample's gradient a
function of them, and no bound on one sample's influence holds. So does a mean in which samples differ in their shares.

Shape letters: B samples, N rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise, takewhile
from math import isfinite, prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch
from ghostclip.capture.backward_entry import is_output
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import shape_at
from ghostclip.capture.row_maps import RowMap, samples_axis
from ghostclip.capture.sample_axis import sample_picked
from ghostclip.checks.linear_paths import Factors, Number, Path, ReducedAxes, grouped, looks_plain, paths
from ghostclip.checks.losses import in_words
from ghostclip.errors import LossReductionError
from ghostclip.kernels.sums import add_rows_

TOLERANCE: Final = 1e-6
# What counts of a batch are: larger than this, however they were divided.
_LARGE, _ROUNDED = 64, 1e-9
# Nodes that put axes into another order.
_TURNS: Final = ("TBackward", "TransposeBackward", "PermuteBackward")
SCHEDULES: Final = (
    "A factor that follows a public schedule, and no data, is declared with ghostclip.losses.scheduled(loss, factor)."
)
_CONSTANTS: Final = (
    "Use a number of Python for a public constant, for weights of the samples in a loop over them shape (B,) behind it "
    "(torch.stack(losses) * weights), for constants of a distribution tensors with an entry for each feature "
    "(Normal(torch.zeros(d), torch.ones(d)) in the place of Normal(0.0, 1.0))"
)
_MEAN_AS_SUM: Final = (
    "loss_reduction='sum' was declared, but the loss was reduced over the samples by a mean: every norm would be off "
    "by the batch size. Pass loss_reduction='mean'; or for losses of shape (B,) call losses.sum().backward() or "
    "clipper.backward(losses)."
)
# Products of more axes than this are not formed.
_MAX_AXES: Final = 6
# Returns numbers that were counted in a batch.
Counts = Callable[[], Iterable[int]]
# Forms of what says nothing of how it was reduced.
ANY: Final = frozenset({"mean", "sum", "samples", "values"})
SUM: Final = frozenset({"sum"})


def counted_positions(
    path: Path, row_map: RowMap, batch_size: int, *, roots: Sequence[Any], grads: Sequence[Tensor | None]
) -> int:
    """Return the number of values that count in a sum, if it is equal for all samples; else 0."""
    # Those that torch's own loss at the end of a path does not ignore, classes having no weights; or those that a mask
    # takes which the sum was divided by: (each * mask).sum() / mask.sum().
    if _torch.has_saved(path.loss, "ignore_index") and _torch.saved(path.loss, "weight") is None:
        share_B, rounding = _shares(path.loss, row_map, batch_size), 0.0
    elif any(number.divides and not number.plain for number in path.numbers) and row_map.kind != "one":
        factor = prod(number.factor for number in path.numbers)
        gradient = _at_first_pick(path, roots, grads)
        share_B, rounding = _weights(path, row_map, batch_size, gradient) / factor, TOLERANCE
    else:
        return 0
    are_equal = torch.allclose(share_B, share_B[0].expand_as(share_B), rtol=rounding, atol=0.0)
    return round(float(share_B.sum().abs())) if are_equal else 0


def check_shares(path: Path, row_map: RowMap, *, batch_size: int, picked: bool, roots: Any, grads: Any) -> None:
    """Refuse a mean whose divisor depends on all samples."""
    # cross_entropy(..., ignore_index=-100) over the tokens of a batch divides by the number of tokens that count in the
    # whole batch (or by the sum of their class weights); losses[mask].mean() by the number that a mask lets through.
    # Where samples differ in that number, removing one sample rescales all others. `picked`: values were picked on the
    # way.
    share_B = None
    if picked:
        gradient = _at_first_pick(path, roots, grads)
        share_B = _weights(path, row_map, batch_size, gradient)
        if not _are_equal(share_B):
            # Samples may have factors of their own, if as many values of each were picked.
            share_B = _weights(path, row_map, batch_size, torch.ones_like(gradient))
    elif _torch.has_saved(path.loss, "total_weight"):
        share_B = None if _all_count(path.loss, batch_size, row_map) else _shares(path.loss, row_map, batch_size)
    elif row_map.kind == "gathered" and row_map.samples is not None:
        share_B = torch.bincount(row_map.samples, minlength=batch_size).double()
    for step in path.reduced:
        if step.kind == "mean" and not picked and len(path.reduced) == 1 and prod(step.sizes) % batch_size:
            raise LossReductionError(not_over_samples(step.count, batch_size))
    if share_B is None or _are_equal(share_B):
        return
    if picked or row_map.kind == "gathered":
        raise LossReductionError(not_over_samples(path.reduced[-1].count, batch_size))
    raise LossReductionError(_uneven(path.loss, share_B))


def _are_equal(share_B: Tensor) -> bool:
    """Return whether all samples have the same share, within rounding."""
    return torch.allclose(share_B, share_B[0].expand_as(share_B), rtol=1e-6, atol=0.0)


def _uneven(loss: Any, share_B: Tensor) -> str:
    """Return the error text for samples with different parts of a divisor of the batch, with the remedy."""
    weighted = _torch.saved(loss, "weight") is not None
    if weighted or _torch.saved(loss, "target").numel() == share_B.numel():
        divisor = "the sum of the class weights of" if weighted else "how many samples ignore_index leaves over in"
        return (
            f"the loss is divided by {divisor} the batch: each sample's gradient would depend on the others' labels. "
            "Use reduction='none', with the same weight and ignore_index, and average each sample over its own "
            "positions if it has several; then losses.mean().backward(), or clipper.backward(losses)."
        )
    return (
        "the loss is a mean over all counted positions of the batch, and the samples count differently many "
        f"(between {share_B.min().item():g} and {share_B.max().item():g}): each sample's gradient would depend on "
        "the others' lengths. Use reduction='none' and average each sample over its own positions, giving (B,): for "
        "language models losses = ghostclip.losses.token_losses(logits, labels), shift=False if each position has its "
        "own label; then clipper.backward(losses), or losses.mean().backward() in a plain loop."
    )


def not_over_samples(count: int, batch_size: int) -> str:
    """Return the text of a ``LossReductionError``: the mean is over values that samples do not share evenly."""
    return (
        f"the loss is a mean over {count} values for a batch of {batch_size} samples: a part of it was left out, or "
        "samples differ in number. Give losses (B,), by reduction='none' or torch.stack(sums) / torch.tensor(counts)."
    )


def _all_count(loss: Any, batch_size: int, row_map: RowMap) -> bool:
    """Return whether a mean over labels counts every position with weight 1, as many for each sample."""
    count = _torch.saved(loss, "target").numel()
    even = row_map.kind != "gathered" and count % batch_size == 0
    return even and _torch.saved(loss, "weight") is None and _torch.saved(loss, "total_weight").item() == count


def _shares(loss: Any, row_map: RowMap, batch_size: int) -> Tensor:
    """Return each sample's part of the divisor of a loss over classes, float64."""
    target, weight = _torch.saved(loss, "target"), _torch.saved(loss, "weight")
    ignored = _torch.signed(_torch.saved(loss, "ignore_index"))
    share = torch.ones_like(target, dtype=torch.float64) if weight is None else weight.double()[target.clamp(min=0)]
    return _by_sample(share.masked_fill(target == ignored, 0.0), row_map, max(0, row_map.axis - 1), batch_size)


def _at_first_pick(path: Path, roots: Any, grads: Any) -> Tensor:
    """Return the gradient of the first values on a path that were picked."""
    # The rest of the values may be in another term, whose factors are no business of this one's.
    first = path.from_the_first_pick()[0]
    return torch.autograd.grad(roots, [GradientEdge(*first)], list(grads) or None, retain_graph=True)[0]


def _weights(path: Path, row_map: RowMap, batch_size: int, gradient: Any) -> Tensor:
    """Return each sample's factor in the loss, float64: the gradient at the first picked values, run on to the end."""
    first, *behind = path.from_the_first_pick()
    with torch.no_grad():
        for edge in behind:
            onward = _torch.run_node(first[0], {first[1]: gradient})
            gradient = onward[list(first[0].next_functions).index(edge)] if isinstance(onward, tuple) else onward
            first = edge
    return _by_sample(gradient.detach().double(), row_map, row_map.axis, batch_size)


def _by_sample(value: Tensor, row_map: RowMap, axis: int, batch_size: int) -> Tensor:
    """Return the sum of values of each sample's rows, ``(B,)`` float64."""
    if row_map.kind == "one" or not value.dim():
        return torch.ones(batch_size, dtype=torch.float64)
    rows_N = value.movedim(axis, 0).flatten(1).sum(1) if value.dim() > 1 else value
    sample_N = row_map.samples_of(rows_N.shape[0], batch_size).to(value.device)
    return add_rows_(torch.zeros(batch_size, dtype=torch.float64, device=value.device), sample_N, rows_N)


@dataclass(frozen=True)
class Scale:
    """How a path through a loss is reduced over samples, and by which constant it is multiplied."""

    forms: frozenset[str]  # how it was reduced over samples, in all readings that the sizes allow
    constant: float  # what else it is multiplied by

    def fits(self, other: "Scale") -> bool:
        """Return whether another step's factor may be the same."""
        return bool(self.forms & other.forms) and not differ(self.constant, other.constant)

    def agreed(self, other: "Scale", *, reduction: str) -> "Scale":
        """Return the forms that fit both steps' factors; refuse steps that differ."""
        if not self.fits(other):
            before, now = self._described(), other._described()
            raise LossReductionError(
                f"the loss was {before} in earlier steps and is {now} now. A factor that follows the batch makes each "
                f"sample's gradient depend on the others. {remedy(reduction)} {SCHEDULES} BatchMemoryManager cuts "
                "batches. A backward for another model (a generator) runs after requires_grad_(False) of this one."
            )
        return Scale(self.forms & other.forms, self.constant)

    def _described(self) -> str:
        """Return the scale in words, for an error message."""
        how = "averaged" if "mean" in self.forms else "summed"
        return f"{how} over {' or '.join(sorted(self.forms - {'mean', 'sum'}) or ['samples'])} times {self.constant:g}"


def differ(constant: float, other: float) -> bool:
    """Return whether two factors differ by more than rounding."""
    return abs(constant - other) > TOLERANCE * abs(constant)


def remedy(reduction: str) -> str:
    """Return error sentences with code for a loss per sample."""
    return (
        "Give one loss per sample: losses = F.cross_entropy(logits, labels, reduction='none') for logits of shape "
        "(B, classes); ghostclip.losses.token_losses(logits, labels) for a language model's (B, positions, classes), "
        "which averages each sample over its own positions, with shift=False where each position has its own label; "
        "losses of other kinds times each sample's own weights, (each * mask / mask.sum(1, keepdim=True)).sum(1); of a "
        "loop over samples by all counts together, torch.stack(sums) / torch.tensor(counts); then "
        f"clipper.backward(losses), or losses.{reduction}().backward() in a plain loop."
    )


def loss_paths(losses_B: Tensor, parameters: frozenset[str]) -> dict[tuple[Any, ...], list[Path]]:
    """Return the paths through losses of samples ``(B,)``, by a key that is the same in the next step."""
    path_list: list[Path] = []
    # Of a loss of very many terms the first ones are looked at: a factor of all is met on the way to each.
    # Reading a number is no operation of the training, which somebody may count.
    with suppress(RecursionError), _torch.dispatch_modes_off():
        path_list.extend(paths([((losses_B.grad_fn, losses_B.output_nr), Path())], is_output))
    return grouped(path_list, parameters)


def _refuse_mean(path: Path, row_map: RowMap, batch_size: int, reduction: str) -> None:
    """Refuse a mean that was declared a sum, and one over values of single samples where some have none, or more."""
    if reduction == "sum":
        raise LossReductionError(_MEAN_AS_SUM)
    if row_map.kind != "one":
        return
    for (node, number), piece in reversed([*pairwise((*path.passed(), path.ends[0]))]):
        if node.name() in ("CatBackward0", "StackBackward0"):
            dim = _torch.signed(_torch.saved(node, "dim"))
            share = 1 if node.name().startswith("Stack") else (shape_at(piece) or (1,))[dim]
            whole = (shape_at((node, number)) or (1,))[dim]
            if whole != share * batch_size:
                raise LossReductionError(not_over_samples(whole, batch_size))
            return


def added(parallel_paths: Sequence[Path], constants: Sequence[float], row_map: RowMap, batch_size: int) -> float:
    """Return the sum of the factors of paths to the same values; each sample's, where they lead to rows of samples."""
    by_row: dict[int | None, float] = {}
    for path, constant in zip(parallel_paths, constants, strict=True):
        row = row_of(path, row_map, batch_size) if len(constants) > 1 else None
        by_row[row] = by_row.get(row, 0.0) + constant
    values = set(by_row.values())
    return values.pop() if len(values) == 1 else sum(by_row.values())


def row_of(path: Path, row_map: RowMap, batch_size: int) -> int | None:
    """Return which sample's rows of its end a path leads through; None where it is through those of several."""
    above = [*takewhile(lambda edge: edge not in path.ends, path.passed())]
    sizes = shape_at(path.ends[0]) or ()
    rows = row_map.sample_axis(sizes, batch_size)
    # A loss of torch with a reduction of its own leaves no rows.
    if rows is None or path.loss is not None or rows.size not in sizes[rows.axis :][:1]:
        return None
    return sample_picked(rows, [path.ends[0], *reversed(above)])


def constant_of(parallel_paths: Sequence[Path], *, batch_size: int, axis: int, counts: Counts) -> float:
    """Return the constant factor of paths to the same values of losses, without sizes of one sample."""
    # Refused: multiplication by one tensor, as by a GradScaler, or a choice by one condition; and a number that looks
    # like a count of the batch. It may follow other samples, and clipping cannot undo it.
    each = [_path_constant(path, batch_size, axis, counts) if path.numbers else 1.0 for path in parallel_paths]
    return added(parallel_paths, each, RowMap("axis", axis), batch_size)


def _path_constant(path: Path, batch_size: int, axis: int, counts: Counts) -> float:
    """Return the product of a path's constant factors; refuse one that other samples may have changed."""
    scalars = [number for number in path.numbers if not number.per_feature]
    plain = [number for number in scalars if number.plain]
    # Of one sample alone a tensor may be the sample's own weight.
    if len(plain) < len(scalars) and batch_size > 1:
        raise LossReductionError(_common(next(number for number in scalars if not number.plain)))
    inner = _inner_sizes(path, batch_size, axis)
    numbers = [number for number in plain if not (number.divides and number.given in inner)]
    constant = prod(number.factor * (-1 if number.given < 0 else 1) for number in numbers)
    if _is_counted(abs(constant), batch_size, counts):
        raise LossReductionError(
            f"every sample's loss is {' and '.join(number.describe() for number in plain)}, which is a number of the "
            "batch (its tokens, its size): each sample's gradient would depend on the others. Divide each sample's "
            f"loss by its own count, as ghostclip.losses.token_losses(logits, labels) does. {SCHEDULES}"
        )
    return constant


def _is_counted(constant: float, batch_size: int, counts: Counts) -> bool:
    """Return whether a factor is a number that was counted in the batch, its inverse, or the batch size over it."""
    if batch_size == 1 or not constant or looks_plain(constant):
        return False
    forms = (constant, 1 / constant, constant * batch_size, batch_size / constant)
    large = [count for count in counts() if count > _LARGE]
    return any(abs(form - count) <= _ROUNDED * count for form in forms for count in large)


def _common(number: Number) -> str:
    """Return the error text for a factor that all samples have in common."""
    if number.chosen:
        return (
            f"every sample's loss is {number.describe()}, which may have been computed from other samples: each "
            "gradient would depend on them. Choose for each sample by itself, torch.where(losses.isfinite(), losses, "
            "0) for losses of shape (B,); samples whose gradient is not finite are left out anyway."
        )
    return (
        f"every sample's loss is {number.describe()}, which may have been computed from other samples (their "
        "lengths, the scale of a GradScaler that adapts to them): each gradient would depend on them. "
        f"{_CONSTANTS}, torch.autocast with bfloat16, which needs no scaler, or GradScaler(enabled=False)."
    )


def scale_of(  # noqa: PLR0913 - what is known of a step and of those before
    path: Path,
    row_map: RowMap,
    forward: ForwardContext,
    *,
    reduction: str,
    counts: Counts,
    counted: Callable[[], int],
    before: Scale | None,
) -> Scale:
    """Return a path's `Scale`, refusing factors that may depend on the batch."""
    # It must be the same in every step: where sizes happen to allow several readings, it is that of the steps `before`.
    # `counted` returns what `counted_positions` does.
    batch_size, axis = forward.batch_size, forward.batch_axis
    for number in path.numbers:
        _refuse_beyond_range(number)
    steps = list(_over_samples(path, row_map, batch_size, axis))
    none = not steps and row_map.kind != "one"
    if batch_size > 1 and (none or any(step.kind == "spread" for step in steps)):
        raise LossReductionError(
            f"the loss comes out of '{in_words(path.name)}', and no operation after it reduces samples by a mean or a "
            f"sum, so its scale is not known. {remedy(reduction)}"
        )
    is_mean = any(step.kind == "mean" for step in steps)
    if batch_size > 1 and is_mean:
        _refuse_mean(path, row_map, batch_size, reduction)
    numbers = [number for number in path.numbers if batch_size > 1 or not number.has_axes]
    sign = prod(-1 if number.given < 0 else 1 for number in numbers)
    # Of one sample a mean is its own.
    readings = [(ANY if is_mean and batch_size == 1 else frozenset({"mean"} if is_mean else {"sum"}), numbers)]
    inner = _inner_sizes(path, batch_size, axis) if numbers else set[int]()
    if not is_mean and reduction == "mean":
        divisors = _divisors(path, steps, row_map, forward)
        known = (number.plain or round(1 / number.factor) in divisors for number in numbers if number.factor)
        # Not asked where it decides nothing: it may take a gradient as large as the logits.
        count = counted() if numbers and (path.loss is not None or not all(known)) else 0
        if count:
            divisors[count] = (divisors.get(count, ("values", True))[0], True)
        readings = _readings(numbers, divisors, batch_size, reduction)

    def scale(forms: frozenset[str], rest: Iterable[Number]) -> Scale:
        factors = (number.factor for number in rest if not (number.divides and number.given in inner))
        return Scale(forms, sign * prod(factors))

    forms, rest = readings[0]
    if before is not None and len(readings) > 1:
        forms, rest = next((one for one in readings if before.fits(scale(*one))), readings[0])
    reduced = path.reduced if rest else ()
    whole = {batch_size, *(size for step in reduced for size in _of_samples(step.sizes, batch_size, axis))}
    for number in rest:
        # A sum that no number divides is one, whatever was declared.
        _check_number(number, inner, batch_size, "sum" if forms == SUM else reduction, whole, counts)
    return scale(forms, rest)


def _over_samples(path: Path, row_map: RowMap, batch_size: int, axis: int) -> Iterator[ReducedAxes]:
    """Yield the reductions over samples, without one of values that were just expanded over the samples."""
    steps = path.reduced
    if row_map.kind == "one":
        # What lies below the place where single samples were put together concerns one sample.
        joined = [number for number, step in enumerate(steps) if step.kind == "joined"]
        steps = steps[: joined[-1]] if joined else ()
    steps = tuple(step for step in steps if step.kind != "joined")
    if len(steps) == 1 and steps[0].kind != "spread":
        yield steps[0]
        return
    waiting: list[ReducedAxes] = []
    for step in steps:
        sample_axis = samples_axis(step.sizes, batch_size, axis)
        if sample_axis not in step.axes and not (row_map.kind == "gathered" and step is steps[-1]):
            continue
        if step.kind != "spread":
            waiting.append(step)
        elif waiting and waiting.pop().kind == "sum":
            # The same value once for each sample.
            waiting.append(step)
    yield from waiting


def picks_samples(path: Path, batch_size: int, axis: int) -> bool:
    """Return whether samples, or values of samples, may have been left out on a path through a loss."""
    return any(not step.axes or samples_axis(step.sizes, batch_size, axis) in step.axes for step in path.picked)


def common_factors(path: Path, row_map: RowMap | None, batch_size: int, axis: int) -> Iterator[tuple[int, Tensor]]:
    """Yield what multiplies the values of all samples alike, as far as sizes tell, with its index on a path."""
    # `row_map`: None where samples are not reduced.
    if not path.factors:
        return
    over = [] if row_map is None else list(map(id, _over_samples(path, row_map, batch_size, axis)))
    sample_axes = partial(_possible_axes, batch_size=batch_size, axis=axis, turned=_is_turned(path, row_map, axis))
    for number, factors in enumerate(path.factors):
        deeper = path.reduced[factors.depth :]
        is_single = row_map is not None and row_map.kind == "one" and all(step.kind != "joined" for step in deeper)
        if is_single and factors.sizes is not None:
            # Below the place where single samples were put together it is one sample's own.
            continue
        if factors.is_matrix and _has_samples(factors.values, batch_size):
            continue
        behind = any(id(step) in over and set(sample_axes(step.sizes)) <= set(step.axes) for step in deeper)
        if behind or factors.sizes is None or _lacks_samples(factors, sample_axes(factors.sizes)):
            yield number, _unrepeated(factors.values)


def _unrepeated(values: Tensor) -> Tensor:
    """Return values once along the axes that they were expanded along, be it over as many samples as there are."""
    return values[tuple(slice(None) if stride else slice(1) for stride in values.stride())]


def _has_samples(matrix: Tensor, batch_size: int) -> bool:
    """Return whether a matrix has rows or columns for each sample, or is one of as many as there are samples."""
    # Or several times as many: heads of samples are folded.
    if matrix.dim() > 2:
        return matrix.shape[0] % batch_size == 0 and matrix.stride(0) != 0
    return any(size == batch_size and stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))


def _possible_axes(sizes: tuple[int, ...], batch_size: int, axis: int, *, turned: bool) -> list[int]:
    """Return the axes that may be the samples': of several with as many entries, all if they may have been turned."""
    exact = [dim for dim, size in enumerate(sizes) if size == batch_size]
    return [axis] if axis in exact and not turned else exact


def _is_turned(path: Path, row_map: RowMap | None, axis: int) -> bool:
    """Return whether samples may lie along another axis of a loss than along that of the batch."""
    moved = row_map is not None and (row_map.kind == "minor" or row_map.axis != axis)
    return moved or any(node.name().startswith(_TURNS) for node, _ in path.passed())


def _lacks_samples(factors: Factors, axes: Sequence[int]) -> bool:
    """Return whether values are repeated along each of the axes that may be the samples', where there is one."""
    values, sizes = factors.values, factors.sizes or ()
    dims = [axis - len(sizes) + values.dim() for axis in axes]
    return bool(dims) and all(dim < 0 or values.shape[dim] == 1 or not values.stride(dim) for dim in dims)


def _inner_sizes(path: Path, batch_size: int, axis: int) -> set[int]:
    """Return numbers of positions of one sample, as shapes show them."""
    inner: set[int] = set()
    for step in path.reduced:
        sample_axis = samples_axis(step.sizes, batch_size, axis)
        inner |= set(_products(size for other, size in enumerate(step.sizes) if other != sample_axis))
    return inner - {1}


def _of_samples(sizes: tuple[int, ...], batch_size: int, axis: int) -> Iterator[int]:
    """Yield how many values all samples have along their axis and any others."""
    sample_axis = samples_axis(sizes, batch_size, axis)
    if sample_axis is not None:
        yield sizes[sample_axis]
        yield from (sizes[sample_axis] * size for size in _products(sizes[:sample_axis] + sizes[sample_axis + 1 :]))


def _products(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the products of every choice of sizes, of the first axes if they are many."""
    leading = list(sizes)[:_MAX_AXES]
    for count in range(1, len(leading) + 1):
        for chosen in combinations(leading, count):
            yield prod(chosen)


def _divisors(
    path: Path, steps: list[ReducedAxes], row_map: RowMap, forward: ForwardContext
) -> dict[int, tuple[str, bool]]:
    """Return the possible divisors of a sum: by count, (what it counts, whether a tensor may contain it)."""
    batch_size, axis = forward.batch_size, forward.batch_axis
    gathered = row_map.samples if row_map.kind == "gathered" else None
    uneven = gathered is not None and bool(
        (gathered.bincount(minlength=batch_size) * batch_size != gathered.numel()).any()
    )
    divisors: dict[int, tuple[str, bool]] = {batch_size: ("samples", False)}
    if not uneven and not picks_samples(path, batch_size, axis):
        sums = [step for step in path.reduced if step.kind == "sum"]
        for number in (number for step in sums for number in _of_samples(step.sizes, batch_size, axis)):
            divisors.setdefault(number, ("values", False))
        # As many as were summed are no count of what a mask lets through.
        for whole in [prod(step.count for step in sums), *(step.count for step in steps)]:
            divisors[whole] = (divisors.get(whole, ("values", True))[0], True)
    return divisors


def _readings(
    numbers: list[Number], divisors: dict[int, tuple[str, bool]], batch_size: int, reduction: str
) -> list[tuple[frozenset[str], list[Number]]]:
    """Return in which forms a sum may be over samples, with the factors that are left: the likeliest first."""
    # A mean, whose divisor is one of the numbers, a tensor or what is written as a divisor before others; else a sum.
    readings = list[tuple[frozenset[str], list[Number]]]()
    for index in sorted(range(len(numbers)), key=lambda index: (numbers[index].plain, not numbers[index].divides)):
        number = numbers[index]
        count = round(1 / number.factor) if number.factor else 0
        form, tensor_too = divisors.get(count, ("", False))
        if form and abs(number.factor * count - 1) <= TOLERANCE and (number.plain or tensor_too):
            rest = numbers[:index] + numbers[index + 1 :]
            readings.append((frozenset({form}) if batch_size > 1 else ANY, rest))
    if batch_size == 1:
        return [*readings, (ANY, numbers)]
    unclear = [number for number in numbers if not number.plain or number.may_count]
    unclear.sort(key=lambda number: (number.plain, not number.divides))
    if not unclear:
        readings.append((SUM, numbers))
    if not readings:
        raise LossReductionError(
            f"the loss is a sum over samples {unclear[0].describe()}, which is neither the batch size {batch_size} "
            "nor a number of values that every sample has alike. Each sample's gradient would depend on the others, on "
            "their lengths for instance; a sum with a weight of your own is declared, loss_reduction='sum'. "
            f"{remedy(reduction)}"
        )
    return readings


def _refuse_beyond_range(number: Number) -> None:
    """Refuse a factor that is infinite, or whose reciprocal is."""
    if not isfinite(number.factor) or (number.factor and not isfinite(1 / number.factor)):
        raise LossReductionError(
            f"the loss is {number.describe()}: no gradient can have such a scale. Leave out what is not finite before "
            "it becomes a factor of all samples."
        )


def _check_number(
    number: Number, inner: set[int], batch_size: int, reduction: str, whole: set[int], counts: Counts
) -> None:
    """Refuse a factor that may have been computed from other samples."""
    if number.chosen:
        raise LossReductionError(
            f"the loss is {number.describe()}, which may have been computed from other samples: each sample's gradient "
            "would depend on them. Choose for each sample by itself, before losses are reduced; samples whose gradient "
            f"is not finite are left out anyway. {remedy(reduction)}"
        )
    if not number.plain:
        raise LossReductionError(
            f"the loss is {number.describe()}, which may have been computed from other samples (their lengths, the "
            f"scale of a GradScaler that adapts to them). {_CONSTANTS}; no GradScaler, "
            f"which torch.autocast with bfloat16 does not need. {remedy(reduction)}"
        )
    if number.divides and number.given in inner:
        return
    too_large = reduction == "sum" and number.divides and batch_size > 1 and number.given in whole
    if too_large or _is_counted(number.factor, batch_size, lambda: (*whole, *counts())):
        raise LossReductionError(
            f"the loss is {number.describe()}, a number of the batch (its size, its lengths): then each sample's "
            f"gradient depends on the others. {remedy(reduction)} {SCHEDULES}"
        )
