"""One noisy sum over all ranks: partial sums are added up and noise is added once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import distributed

from ghostclip import _torch
from ghostclip.distributed.agreement import Group, world_size
from ghostclip.distributed.placement import Box, placement_of
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keyed import KeyedNoise, skip_noise
from ghostclip.noise.packs import add_noise_, copy_back_, draws_shares, flattened, packs

_BUCKET: Final = 25 << 20
"""Bytes of sums that are reduced together, as torch's DistributedDataParallel has them."""


@torch.no_grad()
def noisy_sum_(partial: torch.Tensor, std: float, source: KeyedNoise, *, group: Group = None) -> None:
    """Replace every rank's partial sum by the sum over all ranks plus one draw of noise, the same on all ranks.

    Each rank draws its share of the noise, of blocks of elements, and adds it to its part; all sources keep the same
    position. The noise is that of a run on one machine, and int64 sums (level "exact") are equal to that run's to the
    last bit.

    Privacy:
        Every element gets its noise on one rank. Partial sums travel with the noise of a part of their elements: the
        ranks trust each other, and only the sum is released.

    Cost:
        A rank draws the noise of its share of the elements, as far as these are more than a block for each.

    Args:
        partial: This rank's clipped sum of one parameter, all shapes equal; overwritten.
        std: Standard deviation of the noise in one coordinate.
        source: This rank's source, of which all share the key (`share_noise`); called for the same parameters in the
            same order on all ranks.
        group: The ranks that train together.

    Raises:
        InvalidOptionError: If the sum has a 16-bit type.
    """
    noisy_sums_([partial], std, source, group=group)


@torch.no_grad()
def noisy_sums_(partials: Sequence[torch.Tensor], std: float, source: KeyedNoise, *, group: Group = None) -> None:
    """Replace every rank's partial sums by those over all ranks plus one draw of noise, the same on all ranks.

    As `noisy_sum_` for each, with the noise that one machine adds to all of them at once. A source whose methods were
    covered by others draws all of it on rank 0: on all ranks or on none.

    Args:
        partials: This rank's clipped sums of several parameters, in the same order on all ranks; overwritten.
        std: Standard deviation of the noise in one coordinate.
        source: This rank's source, of which all share the key.
        group: The ranks that train together.

    Raises:
        InvalidOptionError: If a sum has a 16-bit type.
    """
    for partial in partials:
        _require_wide(partial)
    ranks = world_size(group)
    if ranks == 1:
        add_noise_(source, partials, std)
        return
    rank = distributed.get_rank(group)
    if draws_shares(source):
        source.add_share_(partials, std, rank=rank, ranks=ranks)
    elif rank == 0:
        add_noise_(source, partials, std)
    elif std > 0:
        skip_noise(source, partials)
    add_up_(partials, group)


@torch.no_grad()
def noisy_shard(
    partial: torch.Tensor, std: float, source: KeyedNoise, *, group: Group = None
) -> tuple[torch.Tensor, int]:
    """Return this rank's part of the sum over all ranks, with this rank's part of one draw of noise.

    The flattened sum is cut into equal parts, the last ones shorter or empty. Put together they are the release of a
    run on one machine, for any number of ranks.

    Args:
        partial: This rank's clipped sum of one whole parameter; not changed.
        std: Standard deviation of the noise in one coordinate.
        source: As in `noisy_sum_`.
        group: The ranks that train together.

    Returns:
        The part, shape [n], and the number of the first element in the flattened parameter.

    Raises:
        InvalidOptionError: If the sum has a 16-bit type.
    """
    _require_wide(partial)
    total = partial.flatten().clone()
    ranks = world_size(group)
    if ranks > 1:
        _all_reduce(total, group)
    size = -(-total.numel() // ranks)
    start = min(total.numel(), size * (distributed.get_rank(group) if ranks > 1 else 0))
    shard = total[start : start + size].clone()
    source.add_shard_(shard, std, offset=start, total=total.numel())
    return shard, start


@torch.no_grad()
def noisy_parts_(
    sums: Sequence[torch.Tensor], std: float, source: KeyedNoise, *, groups: Sequence[Group] = (None,)
) -> None:
    """Make releases of sums of which some are held in parts: every rank draws the noise of its own part alone.

    The noise is that of one machine, which adds it to all whole sums at once: to the bit, for any number of ranks.

    Args:
        sums: Sums over all ranks as DTensors, and this rank's parts of sums of what every rank has whole, in the same
            order on all ranks; overwritten.
        std: Standard deviation of the noise in one coordinate.
        source: This rank's source, of which all share the key.
        groups: Over these, one after the other, sums of what every rank has whole are added up.

    Raises:
        InvalidOptionError: If a sum has a 16-bit type.

    Cost:
        Noise of a part that is a range of the parameter, or as much as the parameter's where it is none.
    """
    for total in sums:
        _require_wide(total)
    for group in groups:
        if world_size(group) > 1:
            add_up_([total for total in sums if not _torch.is_sharded_tensor(total)], group)
    if std == 0:
        return
    for pack in packs(sums, source._block_size):
        parts = [(_torch.local(total), _box_of(total)) for total in pack]
        first, box = parts[0]
        offset = box.offset
        if len(pack) == 1 and offset is not None:
            source.add_shard_(first, std, offset=offset, total=pack[0].numel())
            continue
        flat_N = torch.zeros(sum(total.numel() for total in pack), dtype=first.dtype, device=first.device)
        wholes = [
            whole.view(box.whole)[box.slices]
            for whole, (_, box) in zip(flat_N.split([total.numel() for total in pack]), parts, strict=True)
        ]
        for whole, (part, _) in zip(wholes, parts, strict=True):
            whole.copy_(part.view(whole.shape))
        source.add_(flat_N, std)
        for whole, (part, _) in zip(wholes, parts, strict=True):
            part.copy_(whole.reshape(part.shape))


def _box_of(total: torch.Tensor) -> Box:
    if _torch.is_sharded_tensor(total):
        return placement_of("sum", total).here
    shape = tuple(total.shape)
    return Box((0,) * len(shape), shape, shape)


def _require_wide(tensor: torch.Tensor) -> None:
    if tensor.dtype in {torch.float16, torch.bfloat16}:
        raise InvalidOptionError(f"sum of {tensor.dtype}: clipped sums are kept and added up in float32 at least.")


@torch.no_grad()
def add_up_(partials: Sequence[torch.Tensor], group: Group) -> None:
    """Add up the sums of all ranks, small ones put together, each bucket under way while the next one is copied.

    A release is reduced once, however many backwards were accumulated for it.

    Args:
        partials: This rank's, in the same order on all ranks; overwritten.
        group: The ranks.
    """
    under_way: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []

    def arrive() -> None:
        bucket, sent, work = under_way.pop(0)
        work.wait()
        if len(bucket) > 1:
            copy_back_(sent, bucket)
        elif sent is not bucket[0]:
            bucket[0].copy_(sent)

    for bucket in packs(partials, lambda partial: _BUCKET // partial.element_size()):
        sent = flattened(bucket) if len(bucket) > 1 else bucket[0].contiguous()
        under_way.append((bucket, sent, distributed.all_reduce(sent, group=group, async_op=True)))
        if len(under_way) > 1:
            arrive()
    while under_way:
        arrive()


def _all_reduce(tensor: torch.Tensor, group: Group) -> None:
    contiguous = tensor.contiguous()
    distributed.all_reduce(contiguous, group=group)
    if contiguous is not tensor:
        tensor.copy_(contiguous)
