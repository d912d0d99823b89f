"""Linear maps, convolutions and products under all their names, from ``F.linear`` and ``addmm`` to ``grouped_mm``.

Products only say which letter each axis has. In grouped products, the rows of a batch are sorted by expert, each block
with its expert's matrix. Convolutions have one, two or three dimensions, may be transposed, and have stride, padding,
dilation and groups; padding modes other than zeros reach the operation as an input that is padded already.

Every product of one parameter with data is a contraction over letters: ``einsum`` and all its special cases. Letters of
the parameter, of the data and of the output say what each axis is. With B samples among the rows L (letters of data and
output only), S (letters of all three: heads, experts), I (parameter and data), O (parameter and output) and F
(parameter alone), the gradient of a sample is ``Σ_L g[L,S,O] ⊗ a[L,S,I]`` with ``a`` the product of the data: an
``Outer`` with S slots, whatever the equation looks like.

Shape letters: B samples, K rows of a sample, T positions, I inputs, O outputs, S groups, N rows (samples, or samples
times frames), L the leading (row) axes, n routed rows, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.factors import Dense, Factor, Outer, Permuted, Stacked, Windows
from ghostclip.factors.base import over_positions, to_accumulation
from ghostclip.factors.convolution import Geometry
from ghostclip.factors.outer import contraction
from ghostclip.kernels import PositionSum, gram
from ghostclip.rules.registry import Call, Captured, Split, register_op


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


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return a setting of a convolution as one number for each axis."""
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


@register_op("conv1d", "conv2d", "conv3d", arguments="input weight bias stride padding dilation groups", by_form=True)
@register_op("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", arguments=_TRANSPOSED, by_form=True)
def convolution(call: Call) -> Captured | None:
    """Rule for a convolution: weight ``Windows`` of the input; None for a tracked input or one without a row axis."""
    # A transposed one's kernel gradient is a convolution's with input and output exchanged.
    transposed = call.name.startswith("conv_transpose")
    x, weight = call.values["input"], call.values["weight"]
    dims = weight.dim() - 2
    if "input" in call.tracked or x.dim() != dims + 2:
        return None
    geometry = _geometry(call, weight.shape)
    needs_weight, needs_bias = "weight" in call.tracked, "bias" in call.tracked

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        factor_of: dict[str, Factor] = {}
        if needs_bias:
            factor_of["bias"] = Dense(PositionSum(split(grad.flatten(2), 1), axes=(1, 3)))
        if needs_weight:
            inner, outer = (grad, saved[0]) if transposed else (saved[0], grad)
            factor_of["weight"] = _weight_factor(split(inner, 1), split(outer, 1), geometry)
        return factor_of

    return Captured((x,) if needs_weight else (), x, 1, factors, "outer product of windows")


def _geometry(call: Call, shape: torch.Size) -> Geometry:
    """Return the geometry of a convolution from its arguments."""
    dims = len(shape) - 2
    dilation, padding = _tuple(call.get("dilation", 1), dims), call.get("padding", 0)
    if padding == "same":
        # 'same' puts the odd element behind, as torch does.
        reaches = [step * (size - 1) for size, step in zip(shape[2:], dilation, strict=True)]
        pads = [(reach // 2, reach - reach // 2) for reach in reaches]
    else:
        pads = [(pad, pad) for pad in ((0,) * dims if isinstance(padding, str) else _tuple(padding, dims))]
    return Geometry(
        shape=shape,
        stride=_tuple(call.get("stride", 1), dims),
        padding=tuple(pads),
        dilation=dilation,
        groups=call.get("groups", 1),
    )


def _weight_factor(x_BKC: Tensor, g_BKO: Tensor, geometry: Geometry) -> Factor:
    """Return the factor of a kernel; of complex numbers over unfolded windows."""
    if not x_BKC.is_complex():
        return Windows(x_BKC, g_BKO, geometry)
    a_NIT, g_NOT = geometry.unfolded(x_BKC, g_BKO.shape[3:]), geometry.by_group(g_BKO)
    return Outer(a_NIT.mT, g_NOT.mT, shape=geometry.shape, slots=geometry.groups)


# Letters for axes that have no name of their own.
_LETTERS = "abcdefgh"


@register_op("linear", arguments="input weight bias", by_form=True)
def linear(call: Call) -> Captured | None:
    """Return the capture of ``y = x Wᵀ + b``: weight ``Outer``, bias ``Dense``; also of a tracked x, without bias."""
    x, weight = call.values["input"], call.values["weight"]
    if weight.dim() != 2:
        return None
    if "input" in call.tracked:
        front = _LETTERS[: x.dim() - 1]
        equation = Equation(front + "i", ("oi",), front + "o")
        return None if "bias" in call.tracked else capture_bilinear(call, equation, ("input", "weight"))
    # The closure must not hold the input: it is kept through autograd, where checkpointing can drop it.
    needs_weight, needs_bias = "weight" in call.tracked, "bias" in call.tracked
    num_batch_dims, shape = x.dim() - 1, weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTO = split(grad, num_batch_dims)
        factor_of: dict[str, Factor] = {}
        weight = Outer(split(saved[0], num_batch_dims), g_BTO, shape=shape) if needs_weight else None
        if weight is not None:
            factor_of["weight"] = weight
        if needs_bias:
            factor_of["bias"] = position_sum(g_BTO, beside=weight)
        return factor_of

    return Captured((x,) if needs_weight else (), x, num_batch_dims, factors, "outer product")


@register_op("addmm", arguments="input mat1 mat2", by_form=True)
def addmm(call: Call) -> Captured | None:
    """Return the capture of ``y = b + x W``, as transformers' ``Conv1D`` writes it; None for scaled terms."""
    if call.get("alpha", 1) != 1 or call.get("beta", 1) != 1:
        return None
    bias = "input" if "input" in call.tracked else ""
    if bias and call.values["input"].dim() != 1:
        return None
    if "mat2" in call.tracked and "mat1" not in call.tracked:
        return _addmm_of_data(call.values["mat1"], call.values["mat2"].shape, bias=bool(bias))
    if not call.tracked - {"input"}:
        # The bias alone is trained: nothing but the gradient is wanted.
        x, weight = call.values["mat1"], call.values["mat2"]
        return capture_product(Equation("io", ("bi",), "bo"), [x], weight=("", weight), bias=bias)
    return capture_bilinear(call, Equation("bi", ("io",), "bo"), ("mat1", "mat2"), bias=bias)


def _addmm_of_data(x: Tensor, shape: Sequence[int], *, bias: bool) -> Captured:
    """Return the capture of ``b + x W`` of a weight stored (I, O): the roles of the two factors are exchanged."""

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTO = split(grad, 1)
        weight = Outer(g_BTO, split(saved[0], 1), shape=shape)
        # The weight first: its norm may leave the sum.
        return {"mat2": weight, "input": position_sum(g_BTO, beside=weight)} if bias else {"mat2": weight}

    return Captured((x,), x, 1, factors, "outer product")


@register_op("bilinear", arguments="input1 input2 weight bias")
def bilinear(call: Call) -> Captured | None:
    """Return the capture of ``y_o = x₁ᵀ W_o x₂ + b_o``: weight ``Outer`` over pairs of inputs, bias ``Dense``."""
    first, second, weight = (call.values[name] for name in ("input1", "input2", "weight"))
    if call.tracked & {"input1", "input2"}:
        return None
    front = _LETTERS[: first.dim() - 1]
    name = "weight" if "weight" in call.tracked else ""
    equation = Equation("oij", (front + "i", front + "j"), front + "o")
    bias = "bias" if "bias" in call.tracked else ""
    return capture_product(equation, [first, second], weight=(name, weight), bias=bias)


@register_op("grouped_mm", _torch.GROUPED_MM, "grouped_mm_fallback", arguments="input weight offs bias out_dtype")
def grouped_mm(call: Call) -> Captured | None:
    """Rule for ``y[rows of e] = x[rows of e] W[e]``: ``Stacked``, one ``Outer`` for every expert that got rows."""
    # Rows (n, I) are sorted by expert, and `offs` says where each expert's rows end. None for other shapes, a tracked
    # input or a bias.
    x, weight, ends = call.values["input"], call.values["weight"], call.values["offs"]
    if "input" in call.tracked or x.dim() != 2 or weight.dim() != 3 or call.get("bias") is not None:
        return None
    shape = weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        row_numbers = torch.arange(grad.shape[0], device=grad.device)
        expert_n = torch.searchsorted(ends.to(grad.device).long(), row_numbers, right=True)
        g_BTO, a_BTI = split(grad, 1), split(saved[0], 1)
        # Rows that only pad a sample carry zeros in both factors, so the expert they count to receives nothing.
        expert_BT = split(expert_n, 1)
        parts: dict[int, Factor] = {}
        for expert, longest in enumerate(_longest(expert_n, expert_BT, shape[0])):
            if not longest:
                continue
            order_BT, valid_BT = _positions_of(expert_BT == expert, longest)
            g, a = _pick(g_BTO, order_BT, valid_BT), _pick(a_BTI, order_BT, valid_BT)
            # W[e] is (I, O), not (O, I): the two sides change places.
            parts[expert] = Outer(g, a, shape=shape[1:])
        return {"weight": Stacked(parts, shape=shape, like=g_BTO)}

    return Captured((x,), x, 1, factors, "outer products of experts")


def _longest(expert_n: Tensor, expert_BT: Tensor, experts: int) -> list[int]:
    """Return the most positions that an expert has of one sample, 0 where it has no row: one read for all experts."""
    if not expert_BT.numel():
        return [0] * experts
    # Rows behind the last expert's are counted beside.
    counts_BE = expert_BT.new_zeros(expert_BT.shape[0], experts + 1)
    counts_BE.scatter_add_(1, expert_BT.clamp(max=experts), torch.ones_like(expert_BT))
    has_rows_E = expert_n.new_zeros(experts + 1).scatter_(0, expert_n.clamp(max=experts), 1)
    longest: list[int] = (counts_BE.amax(0) * has_rows_E)[:experts].tolist()
    return longest


def _positions_of(mask_BT: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return each sample's positions where the mask holds, padded to the largest count, and which are real."""
    counts_B = mask_BT.sum(1)
    order_BT = torch.argsort(~mask_BT, dim=1, stable=True)[:, :longest]
    return order_BT, torch.arange(longest, device=mask_BT.device) < counts_B.unsqueeze(1)


def _pick(x_BTF: Tensor, order_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the entries at some positions of each sample, zero where there are none."""
    index = order_BT.unsqueeze(-1).expand(-1, -1, x_BTF.shape[-1])
    return x_BTF.gather(1, index).where(valid_BT.unsqueeze(-1), 0.0)


# One equation each for operations whose operands have fixed numbers of axes: first, second operand -> result.
_FIXED: Final = {
    "mm": Equation("tk", ("ko",), "to"),
    "bmm": Equation("btk", ("bko",), "bto"),
    "mv": Equation("tk", ("k",), "t"),
    "outer": Equation("t", ("o",), "to"),
    "ger": Equation("t", ("o",), "to"),
    "addmv": Equation("tk", ("k",), "t"),
    "addbmm": Equation("btk", ("bko",), "to"),
    "baddbmm": Equation("btk", ("bko",), "bto"),
    "addr": Equation("t", ("o",), "to"),
}


@register_op("mm", "bmm", "mv", "outer", "ger", arguments="first second")
def fixed_product(call: Call) -> Captured | None:
    """Return the capture of a product whose operands have fixed numbers of axes; None where both are tracked."""
    renamed = _named(call, ("input", "first"), ("mat2", "second"), ("vec", "second"), ("vec2", "second"))
    return capture_bilinear(renamed, _FIXED[call.name], ("first", "second"))


@register_op("addmv", "addbmm", "baddbmm", "addr", arguments="input first second")
def added_product(call: Call) -> Captured | None:
    """Return the capture of ``input + first @ second``; None for scaled terms and a tracked ``input``."""
    renamed = _named(
        call, ("mat", "first"), ("batch1", "first"), ("vec1", "first"), ("vec", "second"), ("batch2", "second"),
        ("vec2", "second"),
    )  # fmt: skip
    if "input" in call.tracked or call.get("alpha", 1) != 1:
        return None
    return capture_bilinear(renamed, _FIXED[call.name], ("first", "second"))


@register_op("matmul", "__matmul__", arguments="first second")
@register_op("__rmatmul__", arguments="second first")
def matmul(call: Call) -> Captured | None:
    """Return the capture of ``x @ y`` for any numbers of axes, the parameter on either side."""
    renamed = _named(call, ("input", "first"), ("other", "second"), ("mat2", "second"))
    first, second = renamed.values["first"], renamed.values["second"]
    equation = _of_matmul(first.dim(), second.dim())
    return None if equation is None else capture_bilinear(renamed, equation, ("first", "second"))


@register_op("inner", arguments="first second")
def inner_product(call: Call) -> Captured | None:
    """Return the capture of ``torch.inner``: a product over the last axis of both operands."""
    renamed = _named(call, ("input", "first"), ("other", "second"))
    axes = [renamed.values[name].dim() - 1 for name in ("first", "second")]
    if min(axes) < 0:
        return None
    left, right = ascii_letters[: axes[0]], ascii_letters[axes[0] : sum(axes)]
    return capture_bilinear(renamed, Equation(left + "Z", (right + "Z",), left + right), ("first", "second"))


@register_op("tensordot", arguments="first second dims")
def tensordot(call: Call) -> Captured | None:
    """Return the capture of a product over chosen axes, a number or two lists."""
    renamed = _named(call, ("a", "first"), ("b", "second"))
    first, second = (list(ascii_letters[: renamed.values[name].dim()]) for name in ("first", "second"))
    second = [letter.upper() for letter in second]
    pairs = _summed_axes(renamed.get("dims", 2), len(first))
    if pairs is None:
        return None
    for left, right in zip(*pairs, strict=True):
        second[right] = first[left]
    output = [letter for letter in first if letter not in second] + [letter for letter in second if letter not in first]
    equation = Equation("".join(first), ("".join(second),), "".join(output))
    return capture_bilinear(renamed, equation, ("first", "second"))


@register_op("einsum", arguments="equation first second third fourth fifth sixth")
def einsum(call: Call) -> Captured | None:
    """Return the capture of any contraction with one tracked operand; None for its form with lists of numbers."""
    names = [name for name in ("first", "second", "third", "fourth", "fifth", "sixth") if name in call.values]
    tensors = [call.values[name] for name in names]
    text = call.values["equation"]
    if len(call.tracked) != 1 or not isinstance(text, str) or not all(isinstance(t, Tensor) for t in tensors):
        return None
    letters = _letters_of(text.replace(" ", ""), [tensor.dim() for tensor in tensors])
    if letters is None:
        return None
    (name,) = call.tracked
    index = names.index(name)
    parameter, (*inputs, output) = letters[index], letters
    equation = Equation(parameter, tuple(part for number, part in enumerate(inputs) if number != index), output)
    data = [tensor for number, tensor in enumerate(tensors) if number != index]
    return capture_product(equation, data, weight=(name, tensors[index]))


def _named(call: Call, *pairs: tuple[str, str]) -> Call:
    """Return the call with torch's keyword names replaced by ours."""
    ours = {theirs: canonical for theirs, canonical in pairs if theirs in call.values}
    values = {ours.get(name, name): value for name, value in call.values.items()}
    return Call(call.name, values, frozenset(ours.get(name, name) for name in call.tracked))


def _of_matmul(first: int, second: int) -> Equation | None:
    """Return the letters of ``matmul`` for operands with so many axes; batch axes are aligned from the right."""
    if not first or not second:
        return None
    batch = "abcdefgh"[: max(first, second, 2) - 2]
    left = (batch[len(batch) - (first - 2) :] + "tk") if first > 1 else "k"
    right = (batch[len(batch) - (second - 2) :] + "ko") if second > 1 else "k"
    return Equation(left, (right,), batch + ("t" if first > 1 else "") + ("o" if second > 1 else ""))


def _summed_axes(dims: Any, axes: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the axes that ``tensordot`` sums over, of both operands; None for another form."""
    if isinstance(dims, int):
        return range(axes - dims, axes), range(dims)
    if isinstance(dims, (tuple, list)) and len(dims) == 2:
        left, right = ([part] if isinstance(part, int) else list(part) for part in dims)
        return left, right
    return None


def _letters_of(equation: str, axes: Sequence[int]) -> list[str] | None:
    """Return the letters of every operand and of the output, an ellipsis spelt out; None where they do not fit."""
    left, arrow, output = equation.partition("->")
    parts = left.split(",")
    if len(parts) != len(axes):
        return None
    spare = [letter for letter in ascii_letters if letter not in equation]
    hidden = [count - len(part) + 3 if "..." in part else 0 for part, count in zip(parts, axes, strict=True)]
    if max(hidden) > len(spare) or min(hidden) < 0:
        return None
    dots = "".join(spare[: max(hidden)])
    spelt = [part.replace("...", dots[len(dots) - count :]) for part, count in zip(parts, hidden, strict=True)]
    if not arrow:
        named = [letter for letter in sorted(set(left) - set(",.")) if left.count(letter) == 1]
        return [*spelt, dots + "".join(named)]
    return [*spelt, output.replace("...", dots)]
