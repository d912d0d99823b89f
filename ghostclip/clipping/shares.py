"""Share of each sample in a mean: where samples differ, each one's gradient depends on the others' lengths.

Shape letters: B samples, N rows.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch
from ghostclip.capture.row_maps import RowMap
from ghostclip.errors import LossReductionError
from ghostclip.evidence.linear_paths import Path
from ghostclip.kernels.sums import add_rows_


def counted_positions(path: Path, row_map: RowMap, batch_size: int) -> int:
    """Return the number of counted positions in torch's own loss at the end of a path, if equal for all samples."""
    # 0 where there is no such loss, where classes have weights, or where samples differ.
    if not _torch.has_saved(path.loss, "ignore_index") or _torch.saved(path.loss, "weight") is not None:
        return 0
    share_B = _shares(path.loss, row_map, batch_size)
    total = int(share_B.sum())
    return total if bool((share_B == share_B[0]).all()) else 0


def check_shares(path: Path, row_map: RowMap, *, batch_size: int, picked: bool, roots: Any, grads: Any) -> None:
    """Refuse a mean whose divisor depends on all samples."""
    # cross_entropy(..., ignore_index=-100) over the tokens of a batch divides by the number of tokens that count in the
    # whole batch (or by the sum of their class weights); losses[mask].mean() by the number that a mask lets through.
    # Where samples differ in that number, removing one sample rescales all others. `picked`: values were picked on the
    # way.
    share_B = None
    if picked:
        share_B = _weights(path, row_map, batch_size, roots, grads)
    elif _torch.has_saved(path.loss, "total_weight"):
        share_B = None if _all_count(path.loss, batch_size, row_map) else _shares(path.loss, row_map, batch_size)
    elif row_map.kind == "gathered" and row_map.samples is not None:
        share_B = torch.bincount(row_map.samples, minlength=batch_size).double()
    for step in path.reduced:
        if step.kind == "mean" and not picked and len(path.reduced) == 1 and prod(step.sizes) % batch_size:
            raise LossReductionError(not_over_samples(step.count, batch_size))
    if share_B is None or torch.allclose(share_B, share_B[0].expand_as(share_B), rtol=1e-6, atol=0.0):
        return
    if picked or row_map.kind == "gathered":
        raise LossReductionError(not_over_samples(path.reduced[-1].count, batch_size))
    raise LossReductionError(_uneven(path.loss, share_B))


def _uneven(loss: Any, share_B: Tensor) -> str:
    """Return the error text for samples with different parts of a divisor of the batch, with the remedy."""
    weighted = _torch.saved(loss, "weight") is not None
    if weighted or _torch.saved(loss, "target").numel() == share_B.numel():
        divisor = "the sum of the class weights of" if weighted else "how many samples ignore_index leaves over in"
        return (
            f"the loss is divided by {divisor} the batch: each sample's gradient would depend on the others' labels. "
            "Use reduction='none', with the same weight and ignore_index, and average each sample over its own "
            "positions if it has several; then losses.mean().backward(), or clipper.backward(losses)."
        )
    return (
        "the loss is a mean over all counted positions of the batch, and the samples count differently many "
        f"(between {share_B.min().item():g} and {share_B.max().item():g}): each sample's gradient would depend on "
        "the others' lengths. Use reduction='none' and average each sample over its own positions, giving (B,): for "
        "language models losses = ghostclip.losses.token_losses(logits, labels), shift=False if each position has its "
        "own label; then clipper.backward(losses), or losses.mean().backward() in a plain loop."
    )


def not_over_samples(count: int, batch_size: int) -> str:
    """Return the text of a ``LossReductionError``: the mean is over values that samples do not share evenly."""
    return (
        f"the loss is a mean over {count} values for a batch of {batch_size} samples: part of the batch was left out, "
        "or samples have different numbers of values. Use reduction='none' and give one loss per sample, shape (B,)."
    )


def _all_count(loss: Any, batch_size: int, row_map: RowMap) -> bool:
    count = _torch.saved(loss, "target").numel()
    even = row_map.kind != "gathered" and count % batch_size == 0
    return even and _torch.saved(loss, "weight") is None and _torch.saved(loss, "total_weight").item() == count


def _shares(loss: Any, row_map: RowMap, batch_size: int) -> Tensor:
    """Return each sample's part of the divisor of a loss over classes, float64."""
    target, weight = _torch.saved(loss, "target"), _torch.saved(loss, "weight")
    ignored = _torch.signed(_torch.saved(loss, "ignore_index"))
    share = torch.ones_like(target, dtype=torch.float64) if weight is None else weight.double()[target.clamp(min=0)]
    return _by_sample(share.masked_fill(target == ignored, 0.0), row_map, max(0, row_map.axis - 1), batch_size)


def _weights(path: Path, row_map: RowMap, batch_size: int, roots: Any, grads: Any) -> Tensor:
    """Return the sum of the factors of each sample's values in the loss, float64."""
    (edge,) = path.ends[:1]
    found: Tensor | None
    (found,) = torch.autograd.grad(roots, [GradientEdge(*edge)], list(grads) or None, retain_graph=True)
    return _by_sample(found.detach().double(), row_map, row_map.axis, batch_size)


def _by_sample(value: Tensor, row_map: RowMap, axis: int, batch_size: int) -> Tensor:
    if row_map.kind == "one" or not value.dim():
        return torch.ones(batch_size, dtype=torch.float64)
    rows_N = value.movedim(axis, 0).flatten(1).sum(1) if value.dim() > 1 else value
    sample_N = row_map.samples_of(rows_N.shape[0], batch_size).to(value.device)
    return add_rows_(torch.zeros(batch_size, dtype=torch.float64, device=value.device), sample_N, rows_N)
