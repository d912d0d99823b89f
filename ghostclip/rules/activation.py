"""Activations with parameters: ``prelu``.

Shape letters: B samples, T positions, C channels.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ghostclip.factors import Dense, Factor
from ghostclip.factors.base import to_accumulation
from ghostclip.rules.registry import Call, Captured, Split, register_op


@register_op("prelu", arguments="input weight")
def prelu(call: Call) -> Captured | None:
    """Return the capture of ``max(0, x) + w·min(0, x)``: ``Dense``, w for each channel (axis 1) or one for all."""
    x, weight = call.values["input"], call.values["weight"]
    if "input" in call.tracked or x.dim() < 1:
        return None
    single = weight.numel() == 1
    order = () if single or x.dim() < 3 else (0, *range(2, x.dim()), 1)
    num_batch_dims = x.dim() if single else x.dim() - 1
    shape = weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        below = to_accumulation(saved[0].permute(order) if order else saved[0]).clamp(max=0)
        product_BTC = split(to_accumulation(grad) * below, num_batch_dims)
        return {"weight": Dense(product_BTC.sum(1).reshape(-1, *shape))}

    return Captured((x,), x.permute(order) if order else x, num_batch_dims, factors, "dense", order)
