"""Agreement of all ranks on the key that batches are drawn from and on the key of the noise.

A key goes from rank 0 to all others once. Equal seeds would not do: every rank would draw the same records.

Everything is exchanged through one gather, which also says at which place each rank is and what one of them refuses: a
rank that cannot go on stops the others at their next exchange, wherever that is, instead of leaving them waiting.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from torch import distributed

from ghostclip.distributed.leaving import elsewhere, require_company
from ghostclip.errors import GhostClipError, InvalidOptionError
from ghostclip.noise.keyed import KeyedNoise

Group = Any
"""A torch process group; None is all ranks."""
_T = TypeVar("_T")

# Of each rank's share of a seed.
_SEED_BITS: Final = 48


def world_size(group: Group = None) -> int:
    """Return the number of ranks, 1 where torch.distributed is not running."""
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size(group) if running else 1


def several_ranks_of(groups: Sequence[Group]) -> list[list[int]]:
    """Return the global ranks of each group that has more than one."""
    return [distributed.get_process_group_ranks(group) for group in groups if world_size(group) > 1]


def is_first(group: Group = None) -> bool:
    """Return whether this is rank 0, or torch.distributed is not running."""
    return world_size(group) == 1 or distributed.get_rank(group) == 0


def share_noise(source: KeyedNoise, group: Group = None) -> None:
    """Give all ranks' sources rank 0's key and position, so that they draw one noise; refuse different levels."""
    require_group()
    found = gathered("noise", (source.level, source.shared_state()), group)
    require_equal("level of noise", [level for level, _ in found])
    source.load_state_dict(found[0][1])


def require_agreement(what: str, value: Any, group: Group = None) -> None:
    """Refuse to go on if the plain Python value differs between ranks; called on all of them."""
    require_equal(what, gathered(what, value, group))


def gathered(what: str, value: Any, group: Group = None) -> list[Any]:
    """Return every rank's plain Python value, in the order of the ranks; called on all of them."""
    # Raises on all ranks if one of them refused to go on, or is at another place of the program.
    if world_size(group) == 1:
        return [value]
    require_company()
    found: list[Any] = [None] * world_size(group)
    distributed.all_gather_object(found, (what, value), group=group)
    for rank, (_, other) in enumerate(found):
        if isinstance(other, _Refusal):
            raise known_to_all(elsewhere(rank, other.kind, other.message))
    for rank, (place, _) in enumerate(found):
        if place != found[0][0]:
            raise known_to_all(
                InvalidOptionError(
                    f"rank {rank} exchanges its {place}, rank 0 its {found[0][0]}: call the same functions with the "
                    "same arguments in the same order on every rank."
                )
            )
    return [other for _, other in found]


def common_numbers(what: str, group: Group = None) -> random.Random:
    """Return an unpredictable generator that draws the same numbers on all ranks; called on all of them."""
    return random.Random(sum(gathered(what, secrets.randbits(_SEED_BITS), group)))


def from_first(what: str, work: Callable[[], _T], group: Group = None) -> _T:
    """Run ``work`` on rank 0 alone and return its plain Python value on every rank; called on all of them."""
    # If rank 0 raises, all ranks raise, with the same class if it is one of the library's.
    with telling(what, group):
        value = work() if is_first(group) else None
    found: _T = gathered(what, value, group)[0]
    return found


@contextlib.contextmanager
def refused_together(what: str, group: Group = None) -> Iterator[None]:
    """Raise on all ranks what one of them raises inside; ranks exchange values inside through this module only."""
    with telling(what, group):
        yield
    gathered(what, None, group)


@contextlib.contextmanager
def telling(what: str, group: Group = None) -> Iterator[None]:
    """Send what this rank raises inside to the others' next exchange; without an error nothing is sent."""
    try:
        yield
    except Exception as error:
        tell_refusal(what, error, group)
        raise


def tell_refusal(what: str, error: Exception, group: Group = None) -> None:
    """Send an error of this rank to the others' next exchange, unless they know of it."""
    if world_size(group) > 1 and not is_known_to_all(error):
        # Where the others are gone already, the error that counts is this rank's own.
        with contextlib.suppress(GhostClipError, RuntimeError):
            gathered(what, _Refusal(type(error).__name__, str(error)), group)
        known_to_all(error)


def is_known_to_all(error: Exception) -> bool:
    """Return whether every rank was told of an error, so that one of them may report it for all."""
    return bool(getattr(error, _KNOWN, False))


class _Refusal(NamedTuple):
    """Refusal that a rank sends in place of its value."""

    kind: str
    message: str


_KNOWN = "_known_to_all_ranks"


def known_to_all(error: Exception) -> Exception:
    """Mark an error as one that every rank knows of, so that no rank is told twice."""
    setattr(error, _KNOWN, True)
    return error


def require_equal(what: str, values: Sequence[Any]) -> None:
    """Refuse values, by rank, that are not all equal."""
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise known_to_all(
            InvalidOptionError(
                f"{what} of rank {different[0]} is {values[different[0]]!r}, of rank 0 {values[0]!r}. Build the "
                "private objects with the same arguments, and resume from the same checkpoint, on every rank."
            )
        )


def require_group() -> None:
    """Refuse to go on where torch.distributed is not running."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidOptionError("distributed=True: call torch.distributed.init_process_group first.")
