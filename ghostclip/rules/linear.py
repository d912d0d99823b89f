"""Linear maps: ``F.linear``, ``addmm`` (transformers' ``Conv1D``), products with a matrix.

Shape letters: B samples, T positions, I inputs, O outputs, L the leading (row) axes.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ghostclip.factors import Dense, Factor, Outer
from ghostclip.factors.base import to_accumulation
from ghostclip.rules.registry import Call, Captured, Split, register_op


def position_sum(g_BTO: Tensor) -> Dense:
    """Return the factor of a bias: the gradient summed over positions (a bias norm never needs a Gram)."""
    return Dense(to_accumulation(g_BTO).sum(1))


@register_op("linear", arguments="input weight bias")
def linear(call: Call) -> Captured | None:
    """Return the capture of ``y = x Wᵀ + b``: weight ``Outer``, bias ``Dense``; None where x is tracked."""
    x, weight = call.values["input"], call.values["weight"]
    if "input" in call.tracked or weight.dim() != 2:
        return None
    # The closure must not hold the input: it is kept through autograd, where checkpointing can drop it.
    needs_weight, needs_bias = "weight" in call.tracked, "bias" in call.tracked
    lead, shape = x.dim() - 1, weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTO = split(grad, lead)
        found: dict[str, Factor] = {}
        if needs_weight:
            found["weight"] = Outer(split(saved[0], lead), g_BTO, shape=shape)
        if needs_bias:
            found["bias"] = position_sum(g_BTO)
        return found

    return Captured((x,) if needs_weight else (), x, lead, factors, "outer product")


@register_op("addmm", arguments="input mat1 mat2")
def addmm(call: Call) -> Captured | None:
    """Return the capture of ``y = b + x W``, as transformers' ``Conv1D`` writes it; None for scaled terms."""
    x, weight = call.values["mat1"], call.values["mat2"]
    if "mat1" in call.tracked or call.get("alpha", 1) != 1 or call.get("beta", 1) != 1:
        return None
    if "input" in call.tracked and call.values["input"].dim() != 1:
        return None
    return _right_product(call, x, weight, weight_name="mat2", bias_name="input")


@register_op("mm", "matmul", "__matmul__", arguments="input mat2")
def matmul(call: Call) -> Captured | None:
    """Return the capture of ``y = x W`` with a tracked matrix on the right, None for any other product."""
    x, weight = call.values["input"], call.values.get("mat2", call.values.get("other"))
    if weight is None or "input" in call.tracked or weight.dim() != 2 or x.dim() < 2:
        return None
    name = "mat2" if "mat2" in call.values else "other"
    return _right_product(call, x, weight, weight_name=name, bias_name="")


@register_op("__rmatmul__", arguments="mat2 input")
def reflected_matmul(call: Call) -> Captured | None:
    """Return the capture of ``x @ W`` as Python calls it on the right operand."""
    return matmul(call)


def _right_product(call: Call, x: Tensor, weight: Tensor, *, weight_name: str, bias_name: str) -> Captured:
    tracked, lead, shape = call.tracked, x.dim() - 1, weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTO = split(grad, lead)
        found: dict[str, Factor] = {}
        if weight_name in tracked:
            # The matrix is stored (I, O): the roles of the two factors are exchanged.
            found[weight_name] = Outer(g_BTO, split(saved[0], lead), shape=shape)
        if bias_name in tracked:
            found[bias_name] = position_sum(g_BTO)
        return found

    return Captured((x,), x, lead, factors, "outer product")
