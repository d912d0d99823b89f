"""What all ranks must have in common: the key that batches are drawn from, and the key of the noise.

A key goes from rank 0 to all others once. Equal seeds would not do: every rank would draw the same records.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keyed import KeyedNoise
from ghostclip.sampling import PrivateSampler

Group = Any
"""A torch process group; None is all ranks."""


def world_size(group: Group = None) -> int:
    """Return the number of ranks.

    Args:
        group: The ranks that train together.

    Returns:
        1 where torch.distributed is not running.
    """
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size(group) if running else 1


def share_sampler(sampler: PrivateSampler, group: Group = None) -> None:
    """Let all ranks draw the same batches and share the records of each among them.

    Privacy:
        Every batch is one draw, as accounted. Each of its records is on exactly one rank.

    Args:
        sampler: Each rank's own, over the same scheme; takes rank 0's key and position.
        group: The ranks that train together.

    Raises:
        InvalidOptionError: If torch.distributed is not running, or the ranks sample differently.
    """
    _require_group()
    state = sampler.state_dict()
    described = {name: state[name] for name in sampler.scheme.describe()}
    require_agreement("sampling", described, group)
    sampler.load_state_dict(_from_first(state, group))
    sampler.share(
        rank=distributed.get_rank(group),
        num_replicas=distributed.get_world_size(group),
        key=sampler.state_dict()["key"],
    )


def share_noise(source: KeyedNoise, group: Group = None) -> None:
    """Let all ranks know one noise, of which each adds its part, or one rank adds all.

    Args:
        source: Each rank's own, of one level; takes rank 0's key and position.
        group: The ranks that train together.

    Raises:
        InvalidOptionError: If torch.distributed is not running, or the levels differ.
    """
    _require_group()
    require_agreement("level of noise", source.level, group)
    source.load_state_dict(_from_first(source.shared_state(), group))


def require_agreement(what: str, value: Any, group: Group = None) -> None:
    """Refuse to go on if ranks differ; every rank must call this.

    Args:
        what: What is compared, for the message.
        value: This rank's value, a plain Python value: `fingerprint()` of a sampler or a noise source, a step, a size.
        group: The ranks that train together.

    Raises:
        InvalidOptionError: On all ranks, if one of them has another value.
    """
    found: list[Any] = [None] * world_size(group)
    if len(found) == 1:
        return
    distributed.all_gather_object(found, value, group=group)
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different:
        raise InvalidOptionError(
            f"{what} of rank {different[0]} is {found[different[0]]!r}, of rank 0 {found[0]!r}. Build the private "
            "objects with the same arguments, and resume from the same checkpoint, on every rank."
        )


def _from_first(value: Any, group: Group) -> Any:
    message = [value]
    first = 0 if group is None else distributed.get_global_rank(group, 0)
    distributed.broadcast_object_list(message, src=first, group=group)
    return message[0]


def _require_group() -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidOptionError("distributed=True: call torch.distributed.init_process_group first.")
