"""One noisy sum over all ranks: partial sums are added up, and noise that all ranks have in common is added once.

So one private optimizer on each rank makes one training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import distributed, nn

from ghostclip import _torch
from ghostclip.distributed.agreement import (
    Group,
    Share,
    agree_on_noise_key,
    digest_of,
    gathered,
    require_agreement,
    require_one_draw,
    several_ranks_of,
    world_size,
)
from ghostclip.distributed.sample_ranks import Shares
from ghostclip.distributed.weights import (
    Box,
    DifferentiallyPrivateDistributedDataParallel,
    placement_of,
    require_equal_weights,
)
from ghostclip.errors import InvalidOptionError
from ghostclip.kernels.sums import content_prints, read_prints
from ghostclip.noise.keyed import KeyedNoise, NoiseSource, add_noise_, copy_back_, draws_at_once, packs

_BUCKET: Final = 25 << 20
"""Bytes of sums that are reduced together, as torch's DistributedDataParallel has them."""
_PRINTED: Final = 1 << 20
"""Values of small tensors whose fingerprint is taken together."""


@torch.no_grad()
def noisy_sums_(partials: Sequence[torch.Tensor], std: float, source: KeyedNoise, *, group: Group = None) -> None:
    """Replace every rank's partial sums by the sums over all ranks plus one draw of noise, the same on all ranks.

    Privacy:
        Every element gets its noise on one rank. Partial sums travel with the noise of a part of their elements: the
        ranks trust each other, and only the sum is released.

    Cost:
        A rank draws the noise of its share of the elements, as far as these are more than a block for each.
    """
    # Each rank draws its share of the noise, of blocks of elements, and adds it to its part; all sources stay at the
    # same position. The noise is that of a run on one machine, which adds it to all parameters at once, and int64 sums
    # (level "exact") are equal to that run's to the last bit. Called for the same parameters in the same order on all
    # ranks. A source whose methods were overridden draws all of it on rank 0: on all ranks or on none.
    for partial in partials:
        _require_wide(partial)
    ranks = world_size(group)
    if ranks == 1:
        add_noise_(source, partials, std)
        return
    rank = distributed.get_rank(group)
    if draws_at_once(source):
        source.add_share_(partials, std, rank=rank, ranks=ranks)
    elif rank == 0:
        add_noise_(source, partials, std)
    elif std > 0:
        for _ in filter(torch.Tensor.numel, partials):
            source.skip()
    add_up_(partials, group)


Part = tuple[torch.Tensor, Box]
"""What this rank has of a sum, and where that lies in it."""


@torch.no_grad()
def noisy_parts_(sums: Sequence[torch.Tensor], parts: Mapping[int, Part], std: float, source: KeyedNoise) -> None:
    """Add noise to this rank's parts of sums, by `id` of the sum: every rank draws the noise of its own parts alone.

    Cost:
        Noise of a part that is a range of the parameter, or as much as the parameter's where it is none.
    """
    # To the bit the noise that one machine adds to all whole sums at once. `sums` are those of all ranks: of another
    # rank's only size, dtype and device count.
    for local, _ in parts.values():
        _require_wide(local)
    if std == 0:
        return
    for pack in packs(sums, source._block_size):
        mine = [parts.get(id(total)) for total in pack]
        held = [part for part in mine if part is not None]
        if not held:
            source.skip()
            continue
        first, box = held[0]
        if len(pack) == 1 and box.offset is not None:
            source.add_shard_(first, std, offset=box.offset, total=pack[0].numel())
            continue
        sizes = [total.numel() for total in pack]
        flat_N = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        for whole, part in zip(flat_N.split(sizes), mine, strict=True):
            if part is not None:
                _within(whole, part).copy_(part[0].view(part[1].sizes))
        source.add_(flat_N, std)
        for whole, part in zip(flat_N.split(sizes), mine, strict=True):
            if part is not None:
                part[0].copy_(_within(whole, part).reshape(part[0].shape))


def _within(whole_N: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the place of a part in the flat sum."""
    return whole_N.view(part[1].whole)[part[1].slices]


def parts_here(sums: Sequence[torch.Tensor]) -> dict[int, Part]:
    """Return what this rank has of each sum, by its `id`: all of it, or its part of a DTensor."""
    return {id(total): (_torch.local(total), _box_of(total)) for total in sums}


def _box_of(total: torch.Tensor) -> Box:
    """Return which part of a sum this rank has."""
    if _torch.is_sharded_tensor(total):
        return placement_of("sum", total).here
    shape = tuple(total.shape)
    return Box((0,) * len(shape), shape, shape)


def _require_wide(tensor: torch.Tensor) -> None:
    """Refuse sums of 16 bits."""
    if tensor.dtype in {torch.float16, torch.bfloat16}:
        raise InvalidOptionError(f"sum of {tensor.dtype}: clipped sums are kept and added up in float32 at least.")


@torch.no_grad()
def add_up_(partials: Sequence[torch.Tensor], group: Group) -> None:
    """Add up the sums of all ranks in place, small ones in buckets, each under way while the next one is copied."""
    # A release is reduced once, however many backwards were accumulated for it.
    under_way: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []

    def arrive() -> None:
        bucket, sent, work = under_way.pop(0)
        work.wait()
        if len(bucket) > 1:
            copy_back_(sent, bucket)
        elif sent is not bucket[0]:
            bucket[0].copy_(sent)

    for bucket in packs(partials, lambda partial: _BUCKET // partial.element_size()):
        sent = _torch.flattened(bucket) if len(bucket) > 1 else bucket[0].contiguous()
        under_way.append((bucket, sent, distributed.all_reduce(sent, group=group, async_op=True)))
        if len(under_way) > 1:
            arrive()
    while under_way:
        arrive()


class SharedNoise:
    """Noise source that adds up the ranks' clipped sums and adds noise once.

    Privacy:
        A step is one mechanism on the whole logical batch, if the ranks share its records (`share_sampler`); ranks that
        drew batches of their own would each move the sum by C for one record. Clipped sums travel without noise.
    """

    in_parts = False
    """Whether ranks release other parameters each."""

    # Given to the private optimizer of every rank it makes their steps equal: each rank's sum becomes the noisy sum
    # over the whole logical batch.
    def __init__(self, source: KeyedNoise, group: Group = None, shares: Shares | None = None) -> None:
        """Share rank 0's noise among the ranks of a group; `shares`: how these share each batch."""
        require_agreement("noise_generator", "none" if source.generator is None else "given", group)
        agree_on_noise_key(source, group)
        self._source = source
        self._group = group
        self._agreed = True  # whether ranks are known to have one noise
        self._groups: Sequence[Group] = (group,) if shares is None else shares.groups
        self._copies = 1 if shares is None else shares.copies  # ranks that have the same samples
        self.level = source.level

    def adds_up(self, shares: Shares) -> bool:
        """Return whether whole parameters' sums are added up only over ranks with samples of their own."""
        return several_ranks_of(self._groups) == several_ranks_of(shares.groups)

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Replace a partial sum by the sum over all ranks plus N(0, std²); called on all ranks in the same order."""
        self.release_all_([tensor], std)

    def release_all_(self, tensors: Sequence[torch.Tensor], std: float, divisor: float = 1.0) -> None:
        """Replace several partial sums as `add_` does, and divide; called on all ranks in the same order."""
        self._follow_first()
        if not self._agreed:
            require_agreement("noise", self._fingerprint(), self._group)
            self._agreed = True
        self._noisy_sums_(tensors, std)
        if divisor != 1 and tensors:
            _torch.divide_all_([_torch.local(tensor) for tensor in tensors], divisor)

    def _noisy_sums_(self, tensors: Sequence[torch.Tensor], std: float) -> None:
        """Add up sums and add noise, whole on all ranks or each rank's part of them."""
        if any(map(_torch.is_sharded_tensor, tensors)) or (self._copies > 1 and self._groups != (self._group,)):
            self._add_up([total for total in tensors if not _torch.is_sharded_tensor(total)])
            noisy_parts_(tensors, parts_here(tensors), std, self._source)
        else:
            noisy_sums_(tensors, std, self._source, group=self._group)

    def _add_up(self, sums: Sequence[torch.Tensor]) -> None:
        """Add up sums over the groups, one after the other."""
        for group in self._groups:
            if world_size(group) > 1:
                add_up_(sums, group)

    def require_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that this noise is not for, before ranks agree on a step."""

    def require_one_draw(self, share: Share | None) -> Share:
        """Refuse a step with different draws, mechanisms or noise on the ranks, as `require_one_draw` does."""
        self._follow_first()
        if share is not None:
            share = share._replace(noise=digest_of(self._fingerprint()))
        agreed = require_one_draw(share, self._group, copies=self._copies)
        self._agreed = share is not None
        return agreed

    def _fingerprint(self) -> str:
        """Return which noise comes next, and whether one rank draws all of it: a rank alone must not think so."""
        return self._source.fingerprint() + ", all on rank 0" * (not draws_at_once(self._source))

    def _follow_first(self) -> None:
        """Adopt rank 0's noise where it follows a generator, as only rank 0 decides whether that was seeded anew."""
        if self._source.generator is not None:
            agree_on_noise_key(self._source, self._group)

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the noise follows, None for a key."""
        return self._source.generator

    def renew_key(self) -> None:
        """Draw from a fresh key from here on, the same on all ranks; called on all of them."""
        self._source.renew_key()
        agree_on_noise_key(self._source, self._group)

    drawn = property(attrgetter("_source.drawn"), doc="How far noise was drawn, by key, when a state was loaded.")
    repeats = property(attrgetter("_source.repeats"), doc="Whether the next noise was drawn before.")

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state, which one rank may save for all."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state; that ranks have loaded the same is checked in `add_`."""
        self._source.load_state_dict(state)
        self._agreed = False


def fingerprint(released: Sequence[torch.Tensor], *, in_parts: bool = False) -> str:
    """Return a digest by which a step that is made again after a crash is recognised as the same release.

    Privacy:
        A function of the release alone.

    Cost:
        One pass over the values where they lie (`content_prints`), and one read of a few numbers for each device; one
        exchange where ranks hold them in parts.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in released:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
    flats: dict[torch.device, list[torch.Tensor]] = {}
    for pack in packs([_torch.local(tensor.detach()) for tensor in released], lambda _: _PRINTED):
        flats.setdefault(pack[0].device, []).append(_torch.flattened(pack))
    digest.update(repr(read_prints([content_prints(flat) for flat in flats.values()])).encode())
    if in_parts or any(map(_torch.is_sharded_tensor, released)):
        return hashlib.blake2b(repr(gathered("release", digest.hexdigest())).encode(), digest_size=16).hexdigest()
    return digest.hexdigest()


def noise_for(replicas: int, module: nn.Module, source: KeyedNoise, *, shares: Shares | None = None) -> NoiseSource:
    """Return the noise source of a training."""
    # Shared by all ranks where they share its batches, else the source itself. Called on all ranks; ranks that share
    # batches must have equal models. `replicas`: ranks that share each batch; `shares`: None where each rank has model
    # and samples whole.
    ranks = world_size()
    wrappers = (nn.parallel.DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)
    in_parts = shares is not None
    one_model = isinstance(module, wrappers) or in_parts
    if in_parts and source.level == "exact":
        raise InvalidOptionError(
            "noise_level='exact' with parameters that ranks hold in parts: integers are summed for whole parameters. "
            "Use noise_level='secure'."
        )
    if replicas != ranks and (replicas > 1 or one_model):
        raise InvalidOptionError(
            f"module {type(module).__name__} on {ranks} ranks, batches shared by {replicas}: every rank must take its "
            "share of each batch. Leave out distributed=False, or pass the model without its wrapper on ranks that "
            "train apart from each other."
        )
    if replicas == 1 and not in_parts:
        return source
    require_equal_weights(module)
    return SharedNoise(source, shares=shares)
