"""Linear maps: ``F.linear``, ``addmm`` (transformers' ``Conv1D``), ``F.bilinear``.

Shape letters: B samples, T positions, I inputs, O outputs, L the leading (row) axes.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ghostclip.factors import Factor, Outer
from ghostclip.rules.product import Equation, capture_bilinear, capture_product, position_sum
from ghostclip.rules.registry import Call, Captured, Split, register_op

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
        found: dict[str, Factor] = {}
        weight = Outer(split(saved[0], num_batch_dims), g_BTO, shape=shape) if needs_weight else None
        if weight is not None:
            found["weight"] = weight
        if needs_bias:
            found["bias"] = position_sum(g_BTO, beside=weight)
        return found

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
