"""Products of tensors under all their names: ``matmul``, ``bmm``, ``einsum``, ``tensordot``, vectors, outer products.

Each rule only says which letter each axis has; ``product.py`` does the rest.
"""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any, Final

from torch import Tensor

from ghostclip.rules.product import Equation, capture_bilinear, capture_product
from ghostclip.rules.registry import Call, Captured, register_op

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
    given = _named(call, ("input", "first"), ("mat2", "second"), ("vec", "second"), ("vec2", "second"))
    return capture_bilinear(given, _FIXED[call.name], ("first", "second"))


@register_op("addmv", "addbmm", "baddbmm", "addr", arguments="input first second")
def added_product(call: Call) -> Captured | None:
    """Return the capture of ``input + first @ second``; None for scaled terms and a tracked ``input``."""
    given = _named(
        call, ("mat", "first"), ("batch1", "first"), ("vec1", "first"), ("vec", "second"), ("batch2", "second"),
        ("vec2", "second"),
    )  # fmt: skip
    if "input" in call.tracked or call.get("alpha", 1) != 1:
        return None
    return capture_bilinear(given, _FIXED[call.name], ("first", "second"))


@register_op("matmul", "__matmul__", arguments="first second")
def matmul(call: Call) -> Captured | None:
    """Return the capture of ``x @ y`` for any numbers of axes, the parameter on either side."""
    given = _named(call, ("input", "first"), ("other", "second"), ("mat2", "second"))
    first, second = given.values["first"], given.values["second"]
    equation = _of_matmul(first.dim(), second.dim())
    return None if equation is None else capture_bilinear(given, equation, ("first", "second"))


@register_op("__rmatmul__", arguments="second first")
def reflected_matmul(call: Call) -> Captured | None:
    """Return the capture of ``x @ W`` as Python calls it on the right operand."""
    return matmul(call)


@register_op("inner", arguments="first second")
def inner_product(call: Call) -> Captured | None:
    """Return the capture of a product over the last axes of both operands."""
    given = _named(call, ("input", "first"), ("other", "second"))
    axes = [given.values[name].dim() - 1 for name in ("first", "second")]
    if min(axes) < 0:
        return None
    left, right = ascii_letters[: axes[0]], ascii_letters[axes[0] : sum(axes)]
    return capture_bilinear(given, Equation(left + "Z", (right + "Z",), left + right), ("first", "second"))


@register_op("tensordot", arguments="first second dims")
def tensordot(call: Call) -> Captured | None:
    """Return the capture of a product over chosen axes, a number or two lists."""
    given = _named(call, ("a", "first"), ("b", "second"))
    first, second = (list(ascii_letters[: given.values[name].dim()]) for name in ("first", "second"))
    second = [letter.upper() for letter in second]
    pairs = _summed_axes(given.get("dims", 2), len(first))
    if pairs is None:
        return None
    for left, right in zip(*pairs, strict=True):
        second[right] = first[left]
    output = [letter for letter in first if letter not in second] + [letter for letter in second if letter not in first]
    equation = Equation("".join(first), ("".join(second),), "".join(output))
    return capture_bilinear(given, equation, ("first", "second"))


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
    place = names.index(name)
    own, (*inputs, output) = letters[place], letters
    equation = Equation(own, tuple(part for number, part in enumerate(inputs) if number != place), output)
    data = [tensor for number, tensor in enumerate(tensors) if number != place]
    return capture_product(equation, data, weight=(name, tensors[place]))


def _named(call: Call, *pairs: tuple[str, str]) -> Call:
    """Return the call with torch's keyword names replaced by ours."""
    ours = {theirs: own for theirs, own in pairs if theirs in call.values}
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
