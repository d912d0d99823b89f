"""Agreement of all ranks: on the keys of batches and noise, on each step's draw, and that a rank will not come.

A key goes from rank 0 to all others once. Equal seeds would not do: every rank would draw the same records. Everything
is exchanged through one gather, which also says at which place each rank is and what one of them refuses: a rank that
cannot go on stops the others at their next exchange, wherever that is, instead of leaving them waiting.

In the backward of a model that ranks hold in parts, and in the schedule of a pipeline, each waits for the others,
inside collective operations of torch that nobody can end from outside. So do ranks of which one was left by an error of
the user's own code, in a forward, a loader or an optimizer, at their next exchange. A rank that cannot go on says why
beside them, in the store where the ranks have met (torch's TCPStore); the others read it when their operation has
ended: at once where the connection is closed, else after the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import distributed

from ghostclip import _torch, errors
from ghostclip.errors import GhostClipError, InvalidOptionError
from ghostclip.noise.keyed import KeyedNoise

_T = TypeVar("_T")
_numbers: Final = itertools.count()
_ELSEWHERE: Final = "_of_another_rank"
_END: Final = object()
_SAME_ARGUMENTS: Final = (
    "Build the private objects with the same arguments, and resume from the same checkpoint, on every rank."
)


@dataclass
class _Here:
    """What this rank published last: the point of the program that it left, and why."""

    group: int = 0
    place: str = ""
    reason: str = ""
    is_alone: bool = False
    steps: int = 0
    noted: str = ""


_left: Final = _Here()


class Leaving:
    """Backwards of one model, or releases of one optimizer, which all ranks run equally often."""

    def __init__(self) -> None:
        # The same on all ranks, as they make their models in one order.
        self._number, self._runs = next(_numbers), 0
        self._inside = False

    @contextlib.contextmanager
    def errors_shared(self) -> Iterator[None]:
        """Publish why this rank leaves what runs inside, or raise why another has left it."""
        if self._inside:
            yield
            return
        self._inside, self._runs = True, self._runs + 1
        try:
            yield
        except Exception as error:
            point = f"{self._number}.{self._runs}"
            reason = None if isinstance(error, GhostClipError) else _reason_of_others(point)
            waited = reason is not None or _is_of_waiting(error)
            if waited and reason is None:
                reason = _reason_of_others(_place())
            _leave(point, reason or error, waited=waited)
            if reason is not None:
                raise reason from error
            raise
        finally:
            self._inside = False


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Within the block publish what this rank raises, or raise what another has published instead of arriving."""
    # A rank that goes on nevertheless, with a smaller batch say, withdraws its note.
    if world_size() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        point = _place()
        if _is_of_waiting(error):
            reason = _reason_of_others(point)
            if reason is not None:
                raise reason from error
        elif not getattr(error, _ELSEWHERE, False):
            _left.noted = point
            _say(point, error, waited=False)
        raise
    if _left.noted:
        point, _left.noted = _left.noted, ""
        with contextlib.suppress(RuntimeError):
            _torch.meeting_store().set(_key(distributed.get_rank(), point), "")


def noting_each(batches: Iterable[_T]) -> Iterator[_T]:
    """Yield batches, each fetched within `noting`."""
    iterator = iter(batches)
    while True:
        with noting():
            batch: Any = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def _place() -> str:
    """Return the name of the present step, under which ranks publish errors."""
    return f"step {_left.steps}"


def _is_of_waiting(error: Exception) -> bool:
    """Return whether an error is that of an operation of several ranks: gloo has no class for it."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def elsewhere(rank: int, kind: str, message: str) -> GhostClipError:
    """Return the error that other ranks raise where a rank does not go on, of the same class if it is ours."""
    error_type = getattr(errors, kind, None)
    if not (isinstance(error_type, type) and issubclass(error_type, GhostClipError)):
        error_type = InvalidOptionError
    error: GhostClipError = error_type(f"rank {rank} was refused, and no rank goes on without it: {message}")
    setattr(error, _ELSEWHERE, True)
    return error


def require_company() -> None:
    """Refuse an exchange with ranks that may still wait at a point that this rank has left with an error."""
    point = _left.place
    # A group of another run knows nothing of it.
    if not point or _left.group != id(distributed.group.WORLD):
        return
    if not _left.is_alone:
        _left.is_alone = not _all_left(point)
    if _left.is_alone:
        raise InvalidOptionError(
            "this rank has left a step in which the others wait for it, and cannot meet them again "
            f"({_left.reason}). Let the error end the process on every rank, and go on from a checkpoint."
        )
    _left.place = ""


def _all_left(point: str) -> bool:
    """Return whether every rank has left a point by itself, and none because another did not arrive."""
    store: Any = _torch.meeting_store()
    keys = [_key(rank, point) for rank in range(distributed.get_world_size())]
    try:
        store.wait(keys, store.timeout)
        return not any(json.loads(store.get(key))[2] for key in keys)
    except RuntimeError:
        return False


def _key(rank: int, point: str) -> str:
    """Return the store's key for a rank's error at a point."""
    return f"ghostclip/left/{rank}/{point}"


def _leave(point: str, error: Exception, *, waited: bool) -> None:
    """Record and publish that this rank has left a point with an error."""
    if world_size() == 1:
        return
    _left.group, _left.place, _left.reason, _left.is_alone = id(distributed.group.WORLD), point, str(error), False
    _say(point, error, waited=waited)


def _say(point: str, error: Exception, *, waited: bool) -> None:
    """Publish an error of this rank; `waited`: it left because another did not come."""
    # `waited`: it left because another one did not come. The process that holds the store may be gone: then the error
    # that counts is this rank's own.
    with contextlib.suppress(RuntimeError):
        said = json.dumps([type(error).__name__, str(error), waited])
        _torch.meeting_store().set(_key(distributed.get_rank(), point), said)


def _reason_of_others(point: str) -> GhostClipError | None:
    """Return why another rank left a point; None without a message, or only from ranks that waited in vain."""
    if world_size() == 1:
        return None
    store: Any = _torch.meeting_store()
    for rank in range(world_size()):
        with contextlib.suppress(RuntimeError):
            said = rank != distributed.get_rank() and store.check([_key(rank, point)]) and store.get(_key(rank, point))
            kind, message, waited = json.loads(said) if said else ("", "", True)
            if not waited:
                return elsewhere(rank, kind, message)
    return None


Group = Any
"""A torch process group; None is all ranks."""

# Of each rank's share of a seed.
_SEED_BITS: Final = 48


def world_size(group: Group = None) -> int:
    """Return the number of ranks, 1 where torch.distributed is not running."""
    return distributed.get_world_size(group) if _torch.several_ranks() else 1


def several_ranks_of(groups: Sequence[Group]) -> list[list[int]]:
    """Return the global ranks of each group that has more than one."""
    return [distributed.get_process_group_ranks(group) for group in groups if world_size(group) > 1]


def is_first(group: Group = None) -> bool:
    """Return whether this is rank 0, or torch.distributed is not running."""
    return world_size(group) == 1 or distributed.get_rank(group) == 0


def agree_on_noise_key(source: KeyedNoise, group: Group = None) -> None:
    """Give all ranks' sources rank 0's key and position, so that they draw one noise; refuse different levels."""
    require_group()
    states = gathered("noise", (source.level, source.shared_state()), group)
    require_equal("level of noise", [level for level, _ in states])
    source.load_state_dict(states[0][1])


def require_agreement(what: str, value: Any, group: Group = None) -> None:
    """Refuse to go on if the plain Python value differs between ranks; called on all of them."""
    require_equal(what, gathered(what, value, group))


def gathered(what: str, value: Any, group: Group = None) -> list[Any]:
    """Return every rank's plain Python value, in the order of the ranks; called on all of them."""
    # Raises on all ranks if one of them refused to go on, or is at another point of the program.
    if world_size(group) == 1:
        return [value]
    require_company()
    answers: list[Any] = [None] * world_size(group)
    distributed.all_gather_object(answers, (what, value), group=group)
    for rank, (_, other) in enumerate(answers):
        if isinstance(other, _Refusal):
            raise known_to_all(elsewhere(rank, other.kind, other.message))
    for rank, (label, _) in enumerate(answers):
        if label != answers[0][0]:
            raise known_to_all(
                InvalidOptionError(
                    f"rank {rank} exchanges its {label}, rank 0 its {answers[0][0]}: call the same functions with the "
                    "same arguments in the same order on every rank."
                )
            )
    return [other for _, other in answers]


def common_numbers(what: str, group: Group = None) -> random.Random:
    """Return an unpredictable generator that draws the same numbers on all ranks; called on all of them."""
    return random.Random(sum(gathered(what, secrets.randbits(_SEED_BITS), group)))


def from_first(what: str, work: Callable[[], _T]) -> _T:
    """Run ``work`` on rank 0 alone and return its plain Python value on every rank; called on all of them."""
    # If rank 0 raises, all ranks raise, with the same class if it is one of the library's.
    with announcing_error(what):
        value = work() if is_first() else None
    shared: _T = gathered(what, value)[0]
    return shared


@contextlib.contextmanager
def refusals_shared(what: str, group: Group = None) -> Iterator[None]:
    """Raise on all ranks what one of them raises inside; ranks exchange values inside through this module only."""
    with announcing_error(what, group):
        yield
    gathered(what, None, group)


@contextlib.contextmanager
def announcing_error(what: str, group: Group = None) -> Iterator[None]:
    """Within the block, send what this rank raises to the others' next exchange; without an error send nothing."""
    try:
        yield
    except Exception as error:
        announce_refusal(what, error, group)
        raise


def announce_refusal(what: str, error: Exception, group: Group = None) -> None:
    """Send an error of this rank to the others' next exchange, unless they know of it."""
    if world_size(group) > 1 and not is_known_to_all(error):
        # Where the others are gone already, the error that counts is this rank's own.
        with contextlib.suppress(GhostClipError, RuntimeError):
            gathered(what, _Refusal(type(error).__name__, str(error)), group)
        known_to_all(error)


def is_known_to_all(error: Exception) -> bool:
    """Return whether every rank has received an error, so that one of them may report it for all."""
    return bool(getattr(error, _KNOWN, False))


class _Refusal(NamedTuple):
    """Refusal that a rank sends in place of its value."""

    kind: str
    message: str


_KNOWN = "_known_to_all_ranks"


def known_to_all(error: Exception) -> Exception:
    """Mark an error as one that every rank has received, so that it is not sent again."""
    setattr(error, _KNOWN, True)
    return error


def require_equal(what: str, values: Sequence[Any], remedy: str = _SAME_ARGUMENTS) -> None:
    """Refuse values, by rank, that are not all equal."""
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        shown = f"{what} of rank {different[0]} is {values[different[0]]!r}, of rank 0 {values[0]!r}."
        raise known_to_all(InvalidOptionError(f"{shown} {remedy}"))


def require_group() -> None:
    """Refuse to go on where torch.distributed is not running."""
    if not _torch.several_ranks():
        raise InvalidOptionError("distributed=True: call torch.distributed.init_process_group first.")


_REFUSES, _GOES_ON = 0, 1
_ALIKE: Final = {
    "parameters": (
        "the optimizer of rank {rank} trains other parameters than that of rank 0, or in another order (a set of "
        "parameters has another one in each process): sums would be added up across parameters. Give every rank's "
        "optimizer the same ones in the same order, and freeze the same ones. Nothing was released."
    ),
    "settings": (
        "the optimizer of rank {rank} has another learning rate, or other numbers in its param_groups, than that of "
        "rank 0: the ranks would train models that drift apart. Make optimizers and schedulers alike on every rank, "
        "and step schedulers by the same values (not by a rank's own loss). Nothing was released."
    ),
    "lost": (
        "rank {rank} and rank 0 have not made the same updates: an error ended a step on one of them after all had "
        "agreed on it, so that their weights differ. Let what is raised in a step end the process, and go on from a "
        "checkpoint on every rank. Nothing was released."
    ),
}
"""What else all ranks have in common in a step, and what is said of a rank that differs."""


class Share(NamedTuple):
    """What one rank contributes to a step, and what all ranks must agree on before it is released."""

    rows: int  # samples that the model saw on this rank since the last release
    draw: int = -1  # number of the draw whose batch this rank was handed; -1 if it was handed none
    records: int = -1  # records in the whole draw, over all ranks; -1 likewise
    std: float = 0.0  # standard deviation of the noise in one coordinate, as this rank would add it
    sensitivity: float = 0.0  # L2 sensitivity of the sum, as this rank clips
    noise: int = 0  # which noise comes next; `SharedNoise` sets it
    parameters: int = 0  # digest of what the optimizer updates, in order
    settings: int = 0  # digest of the optimizer's learning rate and other numbers
    lost: int = 0  # releases that all ranks agreed on, and that this one did not make or apply
    asks: int = 0  # 1 where this rank asks for proofs in the next forward, in which all ranks take part
    uses: int = 1  # backwards that a part of the batch went through, see `LogicalBatch`: the sum is divided by them
    rounds: int = 1  # how often the parts went through the whole batch; with `uses` what a record costs

    def __str__(self) -> str:
        draw = "no draw" if self.draw < 0 else f"draw {self.draw} of {self.records} records"
        return f"{draw}, {self.rows} rows seen"


def require_one_draw(share: Share | None, group: Group = None, *, copies: int = 1) -> Share:
    """Refuse a step unless the ranks have one draw; return this rank's share with the largest counts of all ranks.

    Privacy:
        Without this a loader that is sharded once more gives ranks different draws, and a record may take part twice.

    Cost:
        One exchange of 104 bytes; on a backend without a CPU, this waits for the device.
    """
    # Called on all ranks in each step. One process may have got the whole draw and have dealt it out: ranks without a
    # draw are in order as long as the rows that all models saw add up to its records. Where no rank has a draw, nothing
    # is known of the rows. `share` is None where this rank refuses the step and raises afterwards, which makes the
    # others refuse it instead of waiting. `copies`: ranks that each sample is on.
    if world_size(group) == 1:
        return share or Share(0)
    shares = _shares(share, group)
    if share is None:
        return Share(0)
    absent = [rank for rank, other in enumerate(shares) if other is None]
    if absent:
        raise InvalidOptionError(
            f"rank {absent[0]} refuses this step (its own error says why), so no rank makes it: nothing was released."
        )
    met = [other for other in shares if other is not None]
    _require_consistent(met, copies)
    asks, uses, rounds = (max(counts) for counts in zip(*[other[-3:] for other in met], strict=True))
    return share._replace(asks=asks, uses=uses, rounds=rounds)


def digest_of(text: str) -> int:
    """Return a 48-bit hash of a text, by which ranks compare fingerprints."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _require_consistent(shares: Sequence[Share], copies: int) -> None:
    """Refuse shares that differ in draw, noise, bound or optimizer, or whose rows do not add up."""
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
        for name, remedy in _ALIKE.items():
            if getattr(other, name) != getattr(first, name):
                raise InvalidOptionError(remedy.format(rank=rank))
    drawn = [share for share in shares if share.draw >= 0]
    rows = sum(share.rows for share in shares)
    if drawn and ({share[1:3] for share in drawn} != {drawn[0][1:3]} or rows != drawn[0].records * copies):
        each = "; ".join(f"rank {rank}: {share}" for rank, share in enumerate(shares))
        raise InvalidOptionError(
            f"the ranks do not hold one draw whose records all went through the model ({each}). Iterate over the "
            "private loader as make_private returned it, to the end of each batch, on every rank: it is shared by all "
            "ranks already, and what shards it again (accelerator.prepare(loader), say) must not get it. Nothing was "
            "released."
        )


def _shares(share: Share | None, group: Group) -> list[Share | None]:
    """Return every rank's share, None of those that refuse."""
    # Whole numbers of up to 53 bits are exact in float64.
    values = [_REFUSES] * (1 + len(Share._fields)) if share is None else [_GOES_ON, *share]
    packed = torch.tensor(values, dtype=torch.float64, device=_device(group))
    all_packed = [torch.empty_like(packed) for _ in range(world_size(group))]
    require_company()
    distributed.all_gather(all_packed, packed, group=group)
    _left.steps += 1  # all ranks have met for a step, which voids earlier notes
    return [_unpacked(other) for other in torch.stack(all_packed).tolist()]


def _unpacked(numbers: list[float]) -> Share | None:
    """Return a share from numbers; None for a rank that refuses."""
    if numbers[0] != _GOES_ON:
        return None  # also what a rank at another point of the program has sent in its place
    return Share(*map(int, numbers[1:4]), *numbers[4:6], *map(int, numbers[6:]))


def _device(group: Group) -> torch.device:
    """Return the device from which a backend takes a small tensor, the CPU if it can."""
    kinds = [pair.partition(":")[0] for pair in distributed.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
