"""One step on all ranks: that they hold the same draw, and that the records of it all went through the model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import distributed

from ghostclip.distributed.agreement import Group, world_size
from ghostclip.distributed.leaving import all_came, require_company
from ghostclip.errors import InvalidOptionError

_REFUSES, _GOES_ON = 0, 1


class Share(NamedTuple):
    """Contribution of one rank to a step."""

    rows: int  # samples that the model saw on this rank since the last release
    draw: int = -1  # number of the draw whose batch this rank was handed; -1 if it was handed none
    records: int = -1  # records in the whole draw, over all ranks; -1 likewise
    std: float = 0.0  # standard deviation of the noise in one coordinate, as this rank would add it
    sensitivity: float = 0.0  # L2 sensitivity of the sum, as this rank clips
    noise: int = 0  # which noise comes next; `SharedNoise` sets it
    asks: int = 0  # 1 where this rank asks for proofs in the next forward, in which all ranks take part

    def __str__(self) -> str:
        draw = "no draw" if self.draw < 0 else f"draw {self.draw} of {self.records} records"
        return f"{draw}, {self.rows} rows seen"


def require_one_draw(share: Share | None, group: Group = None, *, copies: int = 1) -> bool:
    """Refuse a step unless the ranks have one draw, and return whether a rank asks for proofs in the next forward.

    Privacy:
        Without this a loader that is sharded once more gives ranks different draws, and a record may take part twice.

    Cost:
        One exchange of 64 bytes; on a backend without a CPU, this waits for the device.
    """
    # Called on all ranks in each step. One process may have got the whole draw and have dealt it out: ranks without a
    # draw are in order as long as the rows that all models saw add up to its records. Where no rank has a draw, nothing
    # is known of the rows. `share` is None where this rank refuses the step and raises afterwards, which makes the
    # others refuse it instead of waiting. `copies`: ranks that each sample is on.
    if world_size(group) == 1:
        return share is not None and share.asks > 0
    shares = _shares(share, group)
    if share is None:
        return False
    absent = [rank for rank, other in enumerate(shares) if other is None]
    if absent:
        raise InvalidOptionError(
            f"rank {absent[0]} refuses this step (its own error says why), so no rank makes it: nothing was released."
        )
    _require_consistent([other for other in shares if other is not None], copies)
    return any(other is not None and other.asks for other in shares)


def digest_of(text: str) -> int:
    """Return a 56-bit hash of a text, by which ranks compare fingerprints."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _require_consistent(shares: Sequence[Share], copies: int) -> None:
    first = shares[0]
    for rank, other in enumerate(shares):
        if (other.std, other.sensitivity) != (first.std, first.sensitivity):
            raise InvalidOptionError(
                f"rank {rank} clips to {other.sensitivity:g} and adds noise of {other.std:g}, rank 0 clips to "
                f"{first.sensitivity:g} and adds {first.std:g}. Set σ and C, and step their schedulers, alike on every "
                "rank. Nothing was released."
            )
        if other.noise != first.noise:
            raise InvalidOptionError(
                f"the noise of rank {rank} is not that of rank 0: load the same checkpoint on every rank. Nothing was "
                "released."
            )
    held = [share for share in shares if share.draw >= 0]
    rows = sum(share.rows for share in shares)
    if held and ({share[1:3] for share in held} != {held[0][1:3]} or rows != held[0].records * copies):
        each = "; ".join(f"rank {rank}: {share}" for rank, share in enumerate(shares))
        raise InvalidOptionError(
            f"the ranks do not hold one draw whose records all went through the model ({each}). Iterate over the "
            "private loader as make_private returned it, to the end of each batch, on every rank: it is shared by all "
            "ranks already, and what shards it again (accelerator.prepare(loader), say) must not get it. Nothing was "
            "released."
        )


def _shares(share: Share | None, group: Group) -> list[Share | None]:
    """Return every rank's share, None of those that refuse."""
    own = torch.tensor(_packed(share), dtype=torch.int64, device=_device(group))
    found = [torch.empty_like(own) for _ in range(world_size(group))]
    require_company()
    distributed.all_gather(found, own, group=group)
    all_came()
    return [_unpacked(other) for other in torch.stack(found).tolist()]


def _packed(share: Share | None) -> list[int]:
    if share is None:
        return [_REFUSES] + [0] * len(Share._fields)
    # The bits of a float: ranks must have the same one.
    return [_GOES_ON, *share[:3], *struct.unpack("2q", struct.pack("2d", *share[3:5])), share.noise, share.asks]


def _unpacked(numbers: list[int]) -> Share | None:
    if numbers[0] == _REFUSES:
        return None
    std, sensitivity = struct.unpack("2d", struct.pack("2q", *numbers[4:6]))
    return Share(numbers[1], numbers[2], numbers[3], std, sensitivity, numbers[6], numbers[7])


def _device(group: Group) -> torch.device:
    """Return the device from which a backend takes a small tensor, the CPU if it can."""
    kinds = [pair.partition(":")[0] for pair in distributed.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
