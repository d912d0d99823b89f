"""The linear end of a loss: what lies between a scalar and the first values that are no linear function of it.

A scalar is a sum over samples exactly if it is linear in values of which each belongs to one sample. Autograd's graph
shows the linear part: sums, means, views, selections, products with constants. It is followed from the scalar down to
where it ends, with every factor on the way, so that what is left to prove concerns those values alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.backward_entry import leads_to_forward
from ghostclip.capture.nodes import Edge, shape_at
from ghostclip.losses import SCHEDULED

# Linear in each of its inputs, with factor 1 (or -1), whatever constants take part.
_LINEAR: Final = frozenset(
    {
        "AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward0", "RsubBackward1",
        "NegBackward0", "WhereBackward0", "MaskedFillBackward0", "ExpandBackward0", "ViewBackward0",
        "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0", "ToCopyBackward0",
        "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "PermuteBackward0",
        "TransposeBackward0", "TBackward0", "FlipBackward0", "RollBackward0", "ConstantPadNdBackward0",
        "SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0",
        "IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "MaskedSelectBackward0", "DiagonalBackward0",
        "CatBackward0", "StackBackward0",
    }
)  # fmt: skip
_JOINED: Final = frozenset({"CatBackward0", "StackBackward0"})
# They pick some of the values, along an axis or anywhere.
_SLICED: Final = frozenset({"SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0"})
PICKED: Final = frozenset({"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0", "GatherBackward0"})
_SPREAD: Final = frozenset(
    {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "WhereBackward0", "ExpandBackward0"}
)
# Where they keep a condition.
_CONDITIONS: Final = {"WhereBackward0": "condition", "MaskedFillBackward0": "mask"}
_REDUCING: Final = {"MeanBackward0": True, "MeanBackward1": True, "SumBackward0": False, "SumBackward1": False}
_SCALED: Final = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"})
# torch's own losses keep their reduction as a number: 0 none, 1 mean, 2 sum.
_KINDS: Final = {1: "mean", 2: "sum"}
# Losses whose input has classes on axis 1, and losses of one value a row.
CLASSES: Final = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_ROWS: Final = frozenset({"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"})
# Losses that are given weights, of classes or of other values, and where they keep them.
_OF_CLASSES: Final = CLASSES | {"MultiMarginLossBackward0"}
_WEIGHTS: Final = dict.fromkeys((*_OF_CLASSES, "BinaryCrossEntropyBackward0"), ("weight",)) | {
    "BinaryCrossEntropyWithLogitsBackward0": ("weight", "pos_weight")
}
# Products with something outside the graph, and where they keep what may be it: of matrices, and of single values.
_MATRICES: Final = {
    "MvBackward0": ("self", "vec"), "MmBackward0": ("self", "mat2"), "BmmBackward0": ("self", "mat2"),
    "AddmvBackward0": ("mat", "vec"), "AddmmBackward0": ("mat1", "mat2"), "BaddbmmBackward0": ("batch1", "batch2"),
}  # fmt: skip
_OPERANDS: Final = _MATRICES | {"LerpBackward1": ("weight",)}
_OPERANDS.update(dict.fromkeys(("AddcmulBackward0", "AddcdivBackward0"), ("tensor1", "tensor2")))
# More ways than this through the end of a loss are not followed.
_MAX_STEPS: Final = 20_000


@dataclass(frozen=True)
class Number:
    """A constant that a loss is multiplied with."""

    factor: float  # its value; of a divisor, the reciprocal
    given: float  # as it stands in the code: the multiplier or the divisor
    divides: bool  # whether it is a divisor
    plain: bool  # whether it is a number of Python; a tensor may have been computed from the data
    per_feature: bool = False  # whether it is a tensor along axes behind the samples', which have one entry here
    # whether it is a tensor with axes, which of a batch of one sample may be that sample's own weight
    has_axes: bool = False
    chosen: bool = False  # whether it stands for a condition, by which all values are taken or others in their place

    @property
    def may_count(self) -> bool:
        """Whether it may be one over a number of values; a half, or two thirds, is a weight."""
        if self.factor >= 1 or not self.factor:
            return False
        count = 1 / self.factor
        is_whole = round(count) > 2 and abs(count - round(count)) < 1e-6 * count
        return self.divides or is_whole or not looks_plain(self.factor)

    def describe(self) -> str:
        """Return what was done with it in the loss, for an error message."""
        if self.chosen:
            return "chosen by a condition without axes (torch.where, masked_fill)"
        what = f"{self.given:g}" if self.plain else f"a tensor without axes ({self.given:g})"
        return f"{'divided' if self.divides else 'multiplied'} by {what}"


@dataclass(frozen=True)
class ReducedAxes:
    """Axes that were reduced (or, of a value that was spread, those along which it was repeated)."""

    # ``"mean"``, ``"sum"``, ``"spread"``, ``"joined"`` (several values became one tensor) or ``"picked"`` (some of the
    # values were left out, or may have been)
    kind: str
    sizes: tuple[int, ...] = ()  # the sizes before (of what was spread or joined, after)
    axes: tuple[int, ...] = ()  # which of them

    @property
    def count(self) -> int:
        """How many values became one."""
        return prod(self.sizes[axis] for axis in self.axes)


@dataclass(frozen=True, eq=False)
class Factors:
    """A constant of several values, which samples may have in common or each have of their own."""

    values: Tensor
    sizes: tuple[int, ...] | None  # of what it is multiplied with; None of weights of classes
    depth: int  # how many reductions lie between the scalar and it
    is_matrix: bool = False  # whether it is multiplied in a product of matrices


@dataclass(frozen=True)
class Path:
    """One way from a scalar to values that it is linear in."""

    ends: tuple[Edge, ...] = ()  # these values; several where an elementwise loss of torch compares two of them
    name: str = ""  # the operation that made them, or torch's loss that they went into
    numbers: tuple[Number, ...] = ()  # constant factors, nearest to the scalar first
    reduced: tuple[ReducedAxes, ...] = ()  # reductions, nearest to the scalar first
    picked: tuple[ReducedAxes, ...] = ()  # where values were picked on the way
    factors: tuple[Factors, ...] = ()  # constants of several values, nearest to the scalar first
    loss: Any = None  # the node of torch's own loss at its end, if it reduces
    key: tuple[Any, ...] = ()  # tells the same way in the next step, whatever its constant factors
    way: Any = None  # the value before, how many picks led to it, and how it was reached in turn

    def passed(self) -> list[Edge]:
        """Return the values on the way, from the scalar on."""
        return [edge for edge, _ in self._way()]

    def from_the_first_pick(self) -> list[Edge]:
        """Return the values from the first that was picked to the end, which alone where none was."""
        steps, end = self._way(), self.ends[0]
        passed = [edge for edge, _ in steps]
        passed = passed[: passed.index(end)] if end in passed else passed
        return [*passed[sum(not picks for _, picks in steps) - 1 :], end] if self.picked else [end]

    def cut(self, position: int) -> "Path":
        """Return the path to an earlier value on it, ``position`` counted from the end, with all its factors."""
        # `position`: the value's number from the end, -1 for the last: ways of one form begin in sums of any length. A
        # loss of torch behind it is one sample's own, and so is what that divides by.
        steps = self._way()
        edge, picks = steps[max(position, -len(steps))]
        return replace(self, ends=(edge,), picked=self.picked[:picks], loss=None)

    def _way(self) -> list[tuple[Edge, int]]:
        """Return (edge, how many picks led to it) from the scalar to the end."""
        steps, link = [], self.way
        while link is not None:
            edge, picks, link = link
            steps.append((edge, picks))
        return steps[::-1]


def paths(roots: Sequence[tuple[Edge, Path]], is_output: Callable[[Edge], bool]) -> Iterator[Path]:
    """Follow a loss down to the values that it is linear in."""
    # `roots`: where a backward starts, and what its gradient there amounts to. `is_output` tells a model's output,
    # beyond which nothing is followed. The order does not depend on the data. A `RecursionError` says that there are
    # too many.
    pending = list(reversed(roots))
    steps = 0
    while pending:
        edge, path = pending.pop()
        steps += 1
        if steps > _MAX_STEPS:
            raise RecursionError
        node = edge[0]
        if node is None:
            continue
        name = node.name()
        is_end = is_output(edge)
        following = None if is_end else _follow(edge, name, path)
        if following is None:
            yield _ended(edge, name, path if is_end or name not in _OPERANDS else _with_operands(edge, name, path))
        else:
            pending += [
                (onward, _reached_by(then, (edge, len(path.picked), path.way))) for onward, then in reversed(following)
            ]


def grouped(all_paths: Iterable[Path], parameters: frozenset[str]) -> dict[tuple[Any, ...], list[Path]]:
    """Group paths of one form to the same values, whose factors add up; paths to no forward are left out."""
    # `parameters`: names of those that the forward used: a loss of another head is another loss. Keys tell ways again
    # in the next step: their form, and which of its values they lead to.
    groups: dict[tuple[Any, ...], list[Path]] = {}
    counts: dict[tuple[Any, ...], dict[tuple[Edge, ...], int]] = {}
    for path in all_paths:
        if any(map(leads_to_forward, path.ends)):
            numbers = counts.setdefault(path.key, {})
            number = numbers.setdefault(path.ends, len(numbers))
            groups.setdefault((parameters, number, *path.key), []).append(path)
    return groups


def linear_ends(roots: Iterable[Edge], is_output: Callable[[Edge], bool]) -> Iterator[Edge]:
    """Yield each value that a loss is linear in, once, without looking at any factor."""
    # `is_output` tells a model's output, beyond which nothing is followed.
    pending, visited = list(roots), set[Edge]()
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge in visited:
            continue
        visited.add(edge)
        name, behind = edge[0].name(), [following for following in edge[0].next_functions if following[0] is not None]
        linear = name in _LINEAR or name in _REDUCING or (name in _SCALED and len(behind) == 1)
        if linear and not is_output(edge):
            pending += behind
        else:
            yield edge


def _reached_by(path: Path, way: Any) -> Path:
    """Return a path with another way."""
    return Path(path.ends, path.name, path.numbers, path.reduced, path.picked, path.factors, path.loss, path.key, way)


def _ended(edge: Edge, name: str, path: Path) -> Path:
    """Return the path with its end: a value, or the inputs of a torch loss with that loss's own reduction."""
    node, key = edge[0], (*path.key, name)
    kind, factors = _KINDS.get(_torch.saved_or(node, "reduction", 0)), path.factors
    if name in _WEIGHTS:
        factors = (*factors, *_weights_of(edge, name, path))
    if kind is None:
        return Path((edge,), name, path.numbers, path.reduced, path.picked, factors, None, key, path.way)
    ends = tuple(following for following in node.next_functions if following[0] is not None)
    sizes = _loss_sizes(name, shape_at(ends[0]) or ())
    step = ReducedAxes(kind, sizes, tuple(range(len(sizes))))
    return Path(ends, name, path.numbers, (*path.reduced, step), path.picked, factors, node, (*key, kind), path.way)


def _weights_of(edge: Edge, name: str, path: Path) -> list[Factors]:
    """Return the weights of classes, and of other values, that a loss of torch was given."""
    node, depth = edge[0], len(path.reduced) + 1
    sizes = None if name in _OF_CLASSES else shape_at(node.next_functions[0]) or ()
    # Its own reduction comes after them.
    return [
        Factors(weights, sizes, depth)
        for attribute in _WEIGHTS[name]
        if isinstance(weights := _torch.saved_or(node, attribute, None), Tensor)
    ]


def _with_operands(edge: Edge, name: str, path: Path) -> Path:
    """Return the path extended by the constant operands of the product at its end."""
    is_matrix, depth = name in _MATRICES, len(path.reduced)
    constants = (_torch.saved_or(edge[0], attribute, None) for attribute in _OPERANDS[name])
    more = [
        Factors(constant, None if is_matrix else shape_at(edge) or (), depth, is_matrix=is_matrix)
        for constant in constants
        if isinstance(constant, Tensor) and not constant.requires_grad
    ]
    return replace(path, factors=(*path.factors, *more))


def _loss_sizes(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of what a loss of torch reduces."""
    if name in CLASSES:
        return sizes[:1] + sizes[2:] if len(sizes) > 1 else ()
    return sizes[:1] if name in _ROWS and len(sizes) > 1 else sizes


def _follow(edge: Edge, name: str, path: Path) -> list[tuple[Edge, Path]] | None:
    """Return the values behind a linear operation; None where the linear part ends (a loss of torch's own included)."""
    node = edge[0]
    if name in _LINEAR:
        return _through(edge, name, path)
    if name in _REDUCING:
        step = _reduction(node, name)
        return [(node.next_functions[0], _and(path, name, reduced=(step,) if step.axes else ()))]
    if name in _SCALED:
        return _scaled(edge, name, path)
    return None


def _through(edge: Edge, name: str, path: Path) -> list[tuple[Edge, Path]]:
    """Return the inputs of a linear operation with factor ±1 or alpha, each with its path."""
    node = edge[0]
    if name in _JOINED:
        path = _and(path, name, reduced=(ReducedAxes("joined"),))
    if name in _SLICED or name in PICKED:
        path = _and(path, name, picked=(_picked(node, name),))
    condition = _torch.saved_or(node, _CONDITIONS[name], None) if name in _CONDITIONS else None
    if isinstance(condition, Tensor) and _is_one(condition):
        per_feature = 0 < condition.dim() < len(shape_at(edge) or ())
        has_axes = condition.dim() > 0
        path = _and(path, name, numbers=(Number(1.0, 1.0, False, False, per_feature, has_axes, chosen=True),))
    elif isinstance(condition, Tensor):
        path = _and(path, name, factors=(Factors(condition, shape_at(edge) or (), len(path.reduced)),))
    branches = []
    for number, following in enumerate(node.next_functions):
        if following[0] is None:
            continue
        onward = _spread(edge, following, path) if name in _SPREAD else path
        factor = _sign(name, number) * (_torch.saved_or(node, "alpha", 1) if number == _scaled_input(name) else 1)
        if factor != 1:
            onward = _and(onward, name, numbers=(Number(abs(float(factor)), factor, divides=False, plain=True),))
        branches.append((following, onward))
    return branches


def _scaled_input(name: str) -> int:
    """Return which input of a sum or a difference is multiplied by ``alpha``."""
    return 0 if name.startswith("Rsub") else 1


def _sign(name: str, number: int) -> int:
    """Return the sign with which an input enters a linear operation."""
    return -1 if name.startswith("Neg") or (name.startswith(("Sub", "Rsub")) and number == _scaled_input(name)) else 1


def _and(
    path: Path,
    name: str,
    *,
    numbers: tuple[Number, ...] = (),
    reduced: tuple[ReducedAxes, ...] = (),
    picked: tuple[ReducedAxes, ...] = (),
    factors: tuple[Factors, ...] = (),
) -> Path:
    """Return a path extended by an operation, with the factors or reductions that this adds."""
    return Path(
        numbers=path.numbers + numbers,
        reduced=path.reduced + reduced,
        picked=path.picked + picked,
        factors=path.factors + factors,
        # By whatever it is multiplied, it is the same way.
        key=path.key if numbers or factors else (*path.key, name),
    )


def _picked(node: Any, name: str) -> ReducedAxes:
    """Return along which axes values were picked; no axis stands for all."""
    sizes = shape_at(node.next_functions[0]) or ()
    if name == "MaskedSelectBackward0":
        return ReducedAxes("picked", sizes)
    if name != "IndexBackward0":
        return ReducedAxes("picked", sizes, (_axis(_torch.saved(node, "dim"), len(sizes)),))
    indices = _torch.saved(node, "indices")
    # A mask stands for as many axes as it has.
    whole = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return ReducedAxes(
        "picked", sizes, () if whole else tuple(i for i, index in enumerate(indices) if index is not None)
    )


def _axis(saved: int, count: int) -> int:
    """Return an axis as a node keeps it: a negative one modulo 2^64."""
    return _torch.signed(saved) % max(1, count)


def _reduction(node: Any, name: str) -> ReducedAxes:
    """Return the axes that a sum or mean node reduces."""
    sizes = tuple(_torch.saved(node, "self_sym_sizes"))
    axes = list(range(len(sizes)))
    if name.endswith("1") and len(_torch.saved(node, "dim")):
        axes = sorted({_axis(axis, len(sizes)) for axis in _torch.saved(node, "dim") if sizes})
    return ReducedAxes("mean" if _REDUCING[name] else "sum", sizes, tuple(axes))


def _spread(edge: Edge, following: Edge, path: Path) -> Path:
    """Return the path with the axes along which an input is broadcast."""
    after, before = shape_at(edge), shape_at(following)
    if after == before or after is None or before is None:
        return path
    missing = len(after) - len(before)
    axes = [axis for axis, size in enumerate(after) if size != 1 and (axis < missing or before[axis - missing] != size)]
    return _and(path, "spread", reduced=(ReducedAxes("spread", after, tuple(axes)),)) if axes else path


def _scaled(edge: Edge, name: str, path: Path) -> list[tuple[Edge, Path]] | None:
    """Return the input of a product or quotient by a constant with its path; None where two inputs are in the graph."""
    node = edge[0]
    if name.endswith("1"):
        inner, constant = node.next_functions[0], _torch.saved(node, "other")
    else:
        first, second = node.next_functions
        if (first[0] is None) == (second[0] is None) or (first[0] is None and name == "DivBackward0"):
            return None
        inner, constant = (
            (first, _torch.saved(node, "other")) if second[0] is None else (second, _torch.saved(node, "self"))
        )
    sizes = shape_at(edge) or ()
    number = _number(constant, divides=name.startswith("Div"), axes=len(sizes))
    onward = _spread(edge, inner, path) if name in _SPREAD else path
    if SCHEDULED in node.metadata:
        return [(inner, onward)]
    if number is None:
        return [(inner, _and(onward, name, factors=(Factors(constant, sizes, len(path.reduced)),)))]
    return [(inner, _and(onward, name, numbers=(number,)))]


def _number(constant: Any, *, divides: bool, axes: int) -> Number | None:
    """Return a constant that all values share; None for weights of each."""
    per_feature = has_axes = False
    if isinstance(constant, Tensor):
        if not _is_one(constant):
            return None
        plain, value = _is_python_number(constant), constant.flatten()[0].item()
        per_feature, has_axes = 0 < constant.dim() < axes, constant.dim() > 0
    else:
        plain, value = True, constant
    size = abs(float(value))
    factor = (1 / size if size else float("inf")) if divides else size
    return Number(factor, value, divides=divides, plain=plain, per_feature=per_feature, has_axes=has_axes)


def _is_one(values: Tensor) -> bool:
    """Return whether there is one value, be it expanded along axes."""
    strides = zip(values.shape, values.stride(), strict=True) if values.layout is torch.strided else ((2, 1),)
    return values.numel() == 1 or (values.numel() > 1 and all(size == 1 or not stride for size, stride in strides))


def _is_python_number(constant: Tensor) -> bool:
    """Return whether a tensor without axes stands for a number of Python: then any other decides on the result."""
    if constant.dim():
        return False
    other = torch.float16 if constant.is_floating_point() else torch.uint8
    if constant.dtype is torch.bool:
        return True
    return torch.result_type(constant, torch.zeros((), dtype=other, device=constant.device)) is other


def of_few_digits(number: float) -> float:
    """Return the nearest number of three significant decimal digits."""
    return float(f"{number:.3g}")


def looks_plain(factor: float) -> bool:
    """Return whether a factor is one that people write: of few digits, or one over a small integer."""
    # It has at most three significant decimal digits, or is the reciprocal of an integer up to 64.
    if factor == of_few_digits(factor):
        return True
    fraction = Fraction(factor).limit_denominator(64)
    return fraction.numerator == 1 and abs(float(fraction) - factor) <= 1e-9 * factor
