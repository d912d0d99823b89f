"""Table look-ups: ``F.embedding``.

Shape letters: B samples, T positions, I features, V rows of the table.
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
