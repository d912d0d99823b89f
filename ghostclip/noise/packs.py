"""Small tensors put together, so that drawing noise for a model costs what its elements cost and not its tensors.

Shape letters: N elements of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from ghostclip import _torch


class TensorNoise(Protocol):
    """Source that adds noise to one tensor."""

    def add_(self, tensor: Tensor, std: float) -> None:
        """Add N(0, std²) to every element, in place."""


class JointSource(TensorNoise, Protocol):
    """Source that adds noise to several tensors at once."""

    def add_all_(self, tensors: Sequence[Tensor], std: float) -> None:
        """Add N(0, std²) to every element of all tensors, in place."""


class ReleasingSource(JointSource, Protocol):
    """Source that adds noise and divides."""

    def release_all_(self, tensors: Sequence[Tensor], std: float, divisor: float) -> None:
        """Add N(0, std²) to every element of all tensors and divide, in place."""


def add_noise_(source: TensorNoise, tensors: Sequence[Tensor], std: float, divisor: float = 1.0) -> None:
    """Add N(0, std²) to every element of several tensors and divide, in place, at once where the source can."""
    # The source is called for std 0 as well: one that several ranks share adds up their sums.
    if _stands_for(source, "release_all_", "add_", "add_all_", "add_shard_"):
        cast("ReleasingSource", source).release_all_(tensors, std, divisor)
        return
    if draws_at_once(source):
        cast("JointSource", source).add_all_(tensors, std)
    else:
        for tensor in tensors:
            source.add_(tensor, std=std)
    if divisor != 1 and tensors:
        _torch.divide_all_([_torch.local(tensor) for tensor in tensors], divisor)


def draws_at_once(source: TensorNoise) -> bool:
    """Return whether a source's `add_all_` stands for its `add_`."""
    # One class defines both, and nothing overrides `add_`. A subclass, or a patch, that changes `add_` alone must not
    # be bypassed.
    return _stands_for(source, "add_all_", "add_")


def draws_shares(source: TensorNoise) -> bool:
    """Return whether a source's `add_share_` stands for all of its methods that add noise; see `draws_at_once`."""
    return _stands_for(source, "add_share_", "add_", "add_all_", "add_shard_", "release_all_")


def _stands_for(source: TensorNoise, joint: str, *methods: str) -> bool:
    for kind in type(source).__mro__:
        own = vars(kind)
        if joint in own:
            return all(getattr(getattr(source, name), "__func__", None) is own.get(name) for name in methods)
    return False


def packs(tensors: Sequence[Tensor], limit: Callable[[Tensor], int]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, in an order that follows from the tensors alone."""
    # Tensors above `limit`, the most elements of a list of several, come one by one; empty ones are left out.
    if _are_of_one_kind(tensors):
        yield from _of_one_kind(tensors, list(map(Tensor.numel, tensors)), limit(tensors[0]))
        return
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind, size = (tensor.dtype, tensor.device), tensor.numel()
        if kind not in limits:
            limits[kind] = room[kind] = limit(tensor)
        if size >= limits[kind]:
            yield [tensor]
            continue
        if size == 0:
            continue
        if size > room[kind]:
            yield filling.pop(kind)
            room[kind] = limits[kind]
        room[kind] -= size
        if kind in filling:
            filling[kind].append(tensor)
        else:
            filling[kind] = [tensor]
    yield from filling.values()


_dtype: Final[Callable[[Tensor], torch.dtype]] = attrgetter("dtype")
_device: Final[Callable[[Tensor], torch.device]] = attrgetter("device")


def _are_of_one_kind(tensors: Sequence[Tensor]) -> bool:
    kinds = list(zip(map(_dtype, tensors), map(_device, tensors), strict=True))
    return bool(kinds) and kinds.count(kinds[0]) == len(kinds)


def _of_one_kind(tensors: Sequence[Tensor], sizes: Sequence[int], most: int) -> Iterator[list[Tensor]]:
    """Yield what `packs` does of tensors of one type and device, the common case, of which a model has hundreds."""
    pack, room = list[Tensor](), most
    for tensor, size in zip(tensors, sizes, strict=True):
        if size >= most:
            yield [tensor]
        elif size:
            if size > room:
                yield pack
                pack, room = [], most
            pack.append(tensor)
            room -= size
    if pack:
        yield pack


def flattened(pack: Sequence[Tensor]) -> Tensor:
    """Return a copy of the elements of several tensors, ``(N,)``."""
    return _torch.flattened(pack)


def copy_back_(flat_N: Tensor, pack: Sequence[Tensor]) -> None:
    """Copy the elements back to the tensors that `flattened` copied them from."""
    _torch.copy_all_(pack, _torch.unflattened(flat_N, pack))
