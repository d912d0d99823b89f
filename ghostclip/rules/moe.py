"""Grouped products: the rows of a batch sorted by expert, each block with its expert's matrix.

Shape letters: n routed rows, E experts, B samples, T positions, I inputs, O outputs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.factors import Factor, Outer, Stacked
from ghostclip.rules.registry import Call, Captured, Split, register_op


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
    found: list[int] = (counts_BE.amax(0) * has_rows_E)[:experts].tolist()
    return found


def _positions_of(mask_BT: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return each sample's positions where the mask holds, padded to the largest count, and which are real."""
    counts_B = mask_BT.sum(1)
    order_BT = torch.argsort(~mask_BT, dim=1, stable=True)[:, :longest]
    return order_BT, torch.arange(longest, device=mask_BT.device) < counts_B.unsqueeze(1)


def _pick(x_BTF: Tensor, order_BT: Tensor, valid_BT: Tensor) -> Tensor:
    index = order_BT.unsqueeze(-1).expand(-1, -1, x_BTF.shape[-1])
    return x_BTF.gather(1, index).where(valid_BT.unsqueeze(-1), 0.0)
