"""Bags of table look-ups: ``F.embedding_bag``.

Shape letters: n bags, K look-ups of the longest bag, B samples, T positions, I features.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import Factor
from ghostclip.rules.embedding import padding_row, refuse_max_norm, rows_factor
from ghostclip.rules.registry import Call, Captured, Split, register_op

_ARGUMENTS = (
    "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse "
    "per_sample_weights include_last_offset padding_idx"
)


@register_op("embedding_bag", arguments=_ARGUMENTS)
def embedding_bag(call: Call) -> Captured | None:
    """Rule for a bag: each look-up receives its bag's gradient, weighted; of ``max``, the features it wins."""
    # None for trainable weights of look-ups.
    refuse_max_norm(call)
    mode = call.get("mode", "mean")
    if "per_sample_weights" in call.tracked:
        return None
    if call.get("scale_grad_by_freq", False):
        message = "embedding_bag: scale_grad_by_freq=True counts over the whole batch. Set scale_grad_by_freq=False."
        raise UnsupportedModelError(message)
    weight = call.values["weight"]
    shape, padding = weight.shape, padding_row(call, weight.shape[0])
    ids_nK, weights_nK = _bags(call, padding)
    if mode == "mean":
        weights_nK = weights_nK / weights_nK.sum(1, keepdim=True).clamp(min=1)

    kept = (ids_nK, weights_nK, *([_winners(weight, ids_nK, weights_nK)] if mode == "max" else []))

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        bag_ids, bag_weights = saved[:2]
        g_nKI = grad.unsqueeze(1) * bag_weights.unsqueeze(-1)
        if mode == "max":
            place_K1 = torch.arange(bag_ids.shape[1], device=grad.device).unsqueeze(1)
            g_nKI = g_nKI * (saved[2].unsqueeze(1) == place_K1)
        ids_BT, g_BTI = split(bag_ids, 1).flatten(1), split(g_nKI, 1).flatten(1, 2)
        return {"weight": rows_factor(ids_BT, g_BTI, shape, padding)}

    return Captured(kept, ids_nK, 1, factors, "rows")


def _winners(weight: Tensor, ids_nK: Tensor, weights_nK: Tensor) -> Tensor:
    """Return which look-up of every bag is the largest, shape ``(n, I)``; of repeated ids the first."""
    if ids_nK.shape[1] == 0:
        return ids_nK.new_zeros(ids_nK.shape[0], weight.shape[1])
    values_nKI = weight[ids_nK].masked_fill((weights_nK == 0).unsqueeze(-1), float("-inf"))
    return values_nKI.argmax(1)


def _bags(call: Call, padding: int | None) -> tuple[Tensor, Tensor]:
    """Return ids and weights with one row per bag; look-ups that do not exist have weight 0."""
    ids, offsets = call.values["input"], call.get("offsets")
    given = call.get("per_sample_weights")
    weights = (
        torch.ones_like(ids, dtype=torch.promote_types(call.values["weight"].dtype, torch.float32))
        if given is None
        else given.detach()
    )
    if ids.dim() == 2:
        ids_nK, weights_nK = ids, weights
    else:
        starts = offsets[:-1] if call.get("include_last_offset", False) else offsets
        ends = torch.cat(
            [starts[1:], offsets[-1:] if call.get("include_last_offset", False) else offsets.new_tensor([ids.numel()])]
        )
        place_nK = starts.unsqueeze(1) + torch.arange(
            int((ends - starts).max()) if ends.numel() else 0, device=ids.device
        )
        real_nK = place_nK < ends.unsqueeze(1)
        place_nK = place_nK.clamp(max=max(ids.numel() - 1, 0))
        ids_nK, weights_nK = ids[place_nK], weights[place_nK] * real_nK
    if padding is not None:
        weights_nK = weights_nK * (ids_nK != padding)
    return ids_nK, weights_nK
