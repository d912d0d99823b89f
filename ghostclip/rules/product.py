"""Every product of one parameter with data, as a contraction over letters: ``einsum`` and all its special cases.

Letters of the parameter, of the data and of the output say what each axis is. With B samples among the rows L (letters
of data and output only), S (letters of all three: heads, experts), I (parameter and data), O (parameter and output) and
F (parameter alone), the gradient of a sample is ``Σ_L g[L,S,O] ⊗ a[L,S,I]`` with ``a`` the product of the data: an
``Outer`` with S slots, whatever the equation looks like.

Shape letters: B samples, T positions, S slots, I inputs, O outputs, L the row axes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ghostclip.factors import Dense, Factor, Outer, Permuted
from ghostclip.factors.base import over_positions, to_accumulation
from ghostclip.factors.planner import contraction
from ghostclip.kernels import PositionSum, gram
from ghostclip.rules.registry import Call, Captured, Split


def position_sum(g_BTO: Tensor, beside: Outer | None = None) -> Dense:
    """Return the factor of a bias: the gradient summed over positions (a bias norm never needs a Gram)."""
    # `beside` is the weight's factor with this gradient as a side: a kernel that forms its norm first leaves the sum.
    if g_BTO.shape[1] <= 1:
        return Dense(over_positions(to_accumulation(g_BTO)))
    summed = PositionSum(g_BTO)
    if beside is not None and gram.is_fused(beside.a_NTI, beside.g_NTO):
        beside.also = summed
    return Dense(summed)


@dataclass(frozen=True)
class Equation:
    """The letters of each axis of a product."""

    parameter: str  # letters of the tracked operand
    data: tuple[str, ...]  # letters of every other operand
    output: str  # letters of the result

    @property
    def slots(self) -> str:
        """Letters of parameter, data and output."""
        return self._letters_where(lambda letter: letter in self.output and self._in_data(letter))

    @property
    def inputs(self) -> str:
        """Letters of parameter and data, summed over."""
        return self._letters_where(lambda letter: letter not in self.output and self._in_data(letter))

    @property
    def outputs(self) -> str:
        """Letters of parameter and output."""
        return self._letters_where(lambda letter: letter in self.output and not self._in_data(letter))

    @property
    def free(self) -> str:
        """Letters of the parameter alone, along which all entries have one gradient."""
        return self._letters_where(lambda letter: letter not in self.output and not self._in_data(letter))

    @property
    def rows(self) -> str:
        """Letters of data and output: samples and their positions."""
        return "".join(letter for letter in self.output if letter not in self.parameter)

    def _letters_where(self, holds: Callable[[str], bool]) -> str:
        """Return the parameter's letters for which something holds."""
        return "".join(letter for letter in self.parameter if holds(letter))

    def _in_data(self, letter: str) -> bool:
        return any(letter in letters for letters in self.data)

    @property
    def repeats(self) -> bool:
        """Whether an operand names a letter twice (a diagonal)."""
        return any(len(set(letters)) < len(letters) for letters in (self.parameter, *self.data, self.output))


def capture_product(
    equation: Equation, data: Sequence[Tensor], *, weight: tuple[str, Tensor], bias: str = ""
) -> Captured | None:
    """Return the capture of a product with one tracked operand, and a bias along the last axis of the output."""
    # None where the form has no factors: diagonals, broadcasting, no operand with all rows.
    name, value = weight
    shape = value.shape
    if any(len(letters) != tensor.dim() for letters, tensor in zip(equation.data, data, strict=True)):
        return None
    equation, value, data = _without_broadcasting(equation, value, data)
    sizes = _sizes(equation, [value, *data])
    rows = next((index for index, letters in enumerate(equation.data) if set(equation.rows) <= set(letters)), None)
    if equation.repeats or sizes is None or not equation.rows or rows is None:
        return None
    if bias and (equation.slots or len(equation.outputs) != 1 or equation.output[-1] != equation.outputs):
        return None
    letters = equation.data[rows]
    front = [letters.index(letter) for letter in equation.rows]
    seen = data[rows].permute(*front, *(axis for axis in range(len(letters)) if axis not in front))
    canonical = equation.rows + equation.slots + equation.outputs
    order = tuple(equation.output.index(letter) for letter in canonical)
    num_batch_dims, form = len(equation.rows), "outer product" if equation.inputs or equation.outputs else "dense"

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTSO = split(grad, num_batch_dims)
        factor_of: dict[str, Factor] = {}
        if bias:
            factor_of[bias] = position_sum(g_BTSO)
        if name:
            factor_of[name] = _factor(
                equation, sizes, split(_joined(equation, saved), num_batch_dims), g_BTSO
            ).reshaped(shape)
        return factor_of

    ordered = () if order == tuple(range(len(order))) else order
    return Captured(tuple(data) if name else (), seen, num_batch_dims, factors, form, ordered)


def capture_bilinear(call: Call, equation: Equation, operands: tuple[str, str], *, bias: str = "") -> Captured | None:
    """Return the capture of a product of two operands of which one is tracked."""
    # The equation's `parameter` are letters of the first operand, its only `data` those of the second.
    tracked = [name for name in operands if name in call.tracked]
    if len(tracked) != 1:
        return None
    first, second = (call.values[name] for name in operands)
    if tracked[0] == operands[0]:
        return capture_product(equation, [second], weight=(operands[0], first), bias=bias)
    turned = Equation(equation.data[0], (equation.parameter,), equation.output)
    return capture_product(turned, [first], weight=(operands[1], second), bias=bias)


def _without_broadcasting(
    equation: Equation, value: Tensor, data: Sequence[Tensor]
) -> tuple[Equation, Tensor, tuple[Tensor, ...]]:
    """Leave out axes of size 1 that meet a larger one of the same letter."""
    spelt, operands = (equation.parameter, *equation.data), (value, *data)
    largest: dict[str, int] = {}
    for letters, operand in zip(spelt, operands, strict=True):
        for letter, size in zip(letters, operand.shape, strict=True):
            largest[letter] = max(size, largest.get(letter, 0))
    squeezed = []
    for letters, operand in zip(spelt, operands, strict=True):
        units = [axis for axis, size in enumerate(operand.shape) if size == 1 and largest[letters[axis]] > 1]
        reduced = "".join(letter for axis, letter in enumerate(letters) if axis not in units)
        squeezed.append((reduced, operand.squeeze(units) if units else operand))
    (parameter, value), *rest = squeezed
    return Equation(parameter, tuple(reduced for reduced, _ in rest), equation.output), value, tuple(x for _, x in rest)


def _sizes(equation: Equation, operands: Sequence[Tensor]) -> dict[str, int] | None:
    """Return the size of every letter; None where they do not agree."""
    sizes: dict[str, int] = {}
    for letters, operand in zip((equation.parameter, *equation.data), operands, strict=True):
        for letter, size in zip(letters, operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None
    return sizes


def _joined(equation: Equation, data: Sequence[Tensor]) -> Tensor:
    """Return the product of the data with axes (L, S, I), summed over letters of the data alone."""
    target = equation.rows + equation.slots + equation.inputs
    if len(data) > 1:
        return contraction(f"{','.join(equation.data)}->{target}", *map(to_accumulation, data))
    (letters,), (tensor,) = equation.data, data
    alone = [axis for axis, letter in enumerate(letters) if letter not in target]
    if alone:
        tensor = to_accumulation(tensor).sum(alone)
        letters = "".join(letter for letter in letters if letter in target)
    return tensor.permute(*(letters.index(letter) for letter in target))


def _factor(equation: Equation, sizes: Mapping[str, int], a_BTSI: Tensor, g_BTSO: Tensor) -> Factor:
    """Return the factor of the tracked operand from data and gradients with the row axes brought to (B, T)."""
    slots, inputs, outputs = equation.slots, equation.inputs, equation.outputs
    if not inputs and not outputs:
        factor: Factor = Dense((to_accumulation(g_BTSO) * to_accumulation(a_BTSI)).sum(1))
        return _with_free(equation, sizes, factor, slots)
    count = [prod(sizes[letter] for letter in letters) for letters in (slots, inputs, outputs)]
    a_NTI = _by_slot(a_BTSI, count[0], count[1])
    g_NTO = _by_slot(g_BTSO, count[0], count[2])
    if equation.parameter == slots + inputs + outputs:
        # Stored (S, I, O): the roles of the two factors are exchanged.
        a_NTI, g_NTO, outputs, inputs = g_NTO, a_NTI, inputs, outputs
    layout = slots + outputs + inputs
    shape = torch.Size([sizes[letter] for letter in layout])
    return _with_free(equation, sizes, Outer(a_NTI, g_NTO, shape=shape, slots=count[0]), layout)


def _by_slot(x_BTSF: Tensor, slots: int, features: int) -> Tensor:
    """Return ``(B, T, S·F)`` as ``(B·S, T, F)``."""
    samples, positions = x_BTSF.shape[:2]
    x_BTSF = x_BTSF.reshape(samples, positions, slots, features)
    return x_BTSF.transpose(1, 2).reshape(samples * slots, positions, features)


def _with_free(equation: Equation, sizes: Mapping[str, int], factor: Factor, letters: str) -> Factor:
    """Bring a factor with axes ``letters`` to the parameter's own axes, entries along free ones all alike."""
    parameter = equation.parameter
    if letters == parameter:
        return factor
    order = [letters.index(letter) for letter in parameter if letter in letters]
    if not equation.free:
        return Permuted(factor, order)
    grad = factor.materialize().permute(0, *(axis + 1 for axis in order))
    for axis, letter in enumerate(parameter):
        if letter in equation.free:
            grad = grad.unsqueeze(axis + 1)
    return Dense(grad.expand(-1, *(sizes[letter] for letter in parameter)))
