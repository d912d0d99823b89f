"""Table look-ups, ``F.embedding``, and bags of them, ``F.embedding_bag``.

Shape letters: B samples, T positions, I features, V rows of the table, n bags, K look-ups of the longest bag.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import Factor, Rows
from ghostclip.rules.registry import Call, Captured, Split, register_op


@register_op(
    "embedding", arguments="input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", by_form=True
)
def embedding(call: Call) -> Captured | None:
    """Rule for a look-up: ``Rows``; rows of ``padding_idx`` receive nothing, as in torch."""
    ids, weight = call.values["input"], call.values["weight"]
    refuse_max_norm(call)
    if call.get("scale_grad_by_freq", False):
        message = (
            "embedding: scale_grad_by_freq=True divides each gradient by counts over the whole batch, so that samples "
            "depend on each other. Set scale_grad_by_freq=False."
        )
        raise UnsupportedModelError(message)
    padding = padding_row(call, weight.shape[0])
    num_batch_dims, shape = ids.dim(), weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        ids_BT, g_BTI = split(saved[0], num_batch_dims), split(grad, num_batch_dims)
        return {"weight": rows_factor(ids_BT, g_BTI, shape, padding)}

    return Captured((ids,), ids, num_batch_dims, factors, "rows")


def refuse_max_norm(call: Call) -> None:
    """Refuse a look-up with ``max_norm``, which renormalises the rows it meets in the table itself.

    Privacy:
        Which rows of the table changed tells which ids are in the batch, without any noise.
    """
    bound = call.get("max_norm")
    if bound is not None:
        message = (
            f"{call.name}: max_norm={bound} renormalises, in the table itself, the rows that the batch looks up, so "
            "that the trained table tells without noise which ids were in it. Leave max_norm out (module.max_norm = "
            "None), and renormalise the whole table after step(), which costs no privacy: with torch.no_grad(): "
            f"weight.copy_(weight.renorm({call.get('norm_type', 2.0):g}, 0, {bound}))."
        )
        raise UnsupportedModelError(message)


def padding_row(call: Call, rows: int) -> int | None:
    """Return the number of the row that takes no gradient, counted from the front; None if there is none."""
    padding = call.get("padding_idx")
    if padding is None:
        return None
    return int(padding) % rows if padding >= -rows else None


def rows_factor(ids_BT: Tensor, g_BTI: Tensor, shape: torch.Size, padding: int | None) -> Rows:
    """Return the factor of a look-up without the padding row's gradient."""
    if padding is not None:
        g_BTI = g_BTI.masked_fill((ids_BT == padding).unsqueeze(-1), 0.0)
    return Rows(ids_BT, g_BTI, shape=shape)


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
