"""Why a rank does not come, for the ranks that wait for it.

In the backward of a model that ranks hold in parts, and in the schedule of a pipeline, each waits for the others,
inside collective operations of torch that nobody can end from outside. So do ranks of which one was left by an error of
the user's own code, in a forward, a loader or an optimizer, at their next exchange. A rank that cannot go on says why
beside them, in the store where the ranks have met; the others read it when their operation has ended: at once where the
connection is closed, else after the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import distributed

from ghostclip import _torch, errors
from ghostclip.errors import GhostClipError, InvalidOptionError

_T = TypeVar("_T")
_numbers: Final = itertools.count()
_ELSEWHERE: Final = "_of_another_rank"
_END: Final = object()


@dataclass
class _Here:
    """This rank's abandoned backward, until the others are known to have left it as well, and its noted error."""

    group: int = 0
    place: str = ""
    reason: str = ""
    is_alone: bool = False
    steps: int = 0
    noted: str = ""


_left: Final = _Here()


class Leaving:
    """Backwards of one model, which all ranks run equally often."""

    def __init__(self) -> None:
        # The same on all ranks, as they make their models in one order.
        self._model, self._backwards = next(_numbers), 0
        self._inside = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Publish why this rank leaves a backward, or raise why another has left it."""
        if self._inside:
            yield
            return
        self._inside, self._backwards = True, self._backwards + 1
        try:
            yield
        except Exception as error:
            place = f"{self._model}.{self._backwards}"
            found = None if isinstance(error, GhostClipError) else _reason_of_others(place)
            if found is None and _is_of_waiting(error):
                found = _reason_of_others(_place())
            _leave(place, found or error, waited=found is not None)
            if found is not None:
                raise found from error
            raise
        finally:
            self._inside = False


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Publish what this rank raises, or raise what another rank has published instead of arriving."""
    # A rank that goes on nevertheless, with a smaller batch say, withdraws its note.
    if not _torch.several_ranks() or distributed.get_world_size() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        place = _place()
        if _is_of_waiting(error):
            found = _reason_of_others(place)
            if found is not None:
                raise found from error
        elif not getattr(error, _ELSEWHERE, False):
            _left.noted = place
            _say(place, error, waited=False)
        raise
    if _left.noted:
        place, _left.noted = _left.noted, ""
        with contextlib.suppress(RuntimeError):
            _torch.meeting_store().set(_key(distributed.get_rank(), place), "")


def noting_each(batches: Iterable[_T]) -> Iterator[_T]:
    """Iterate within `noting`."""
    iterator = iter(batches)
    while True:
        with noting():
            batch: Any = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def all_came() -> None:
    """Note that all ranks have met for a step, which voids earlier notes."""
    _left.steps += 1


def _place() -> str:
    return f"step {_left.steps}"


def _is_of_waiting(error: Exception) -> bool:
    """Return whether an error is that of an operation of several ranks: gloo has no class for it."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def elsewhere(rank: int, kind: str, message: str) -> GhostClipError:
    """Return the error that the other ranks raise where a rank does not go on, of its class if it is the library's."""
    own = getattr(errors, kind, None)
    if not (isinstance(own, type) and issubclass(own, GhostClipError)):
        own = InvalidOptionError
    found: GhostClipError = own(f"rank {rank} was refused, and no rank goes on without it: {message}")
    setattr(found, _ELSEWHERE, True)
    return found


def require_company() -> None:
    """Refuse to meet ranks that may still wait in a backward that this one has left, and would take this for it."""
    place = _left.place
    # A group of another run knows nothing of it.
    if not place or _left.group != id(distributed.group.WORLD):
        return
    if not _left.is_alone:
        _left.is_alone = not _all_left(place)
    if _left.is_alone:
        raise InvalidOptionError(
            "this rank has left a backward in which the others wait for it, and cannot meet them again "
            f"({_left.reason}). Let the error end the process on every rank, and go on from a checkpoint."
        )
    _left.place = ""


def _all_left(place: str) -> bool:
    """Return whether every rank has left a backward by itself, and none because another did not arrive."""
    store: Any = _torch.meeting_store()
    keys = [_key(rank, place) for rank in range(distributed.get_world_size())]
    try:
        store.wait(keys, store.timeout)
        return not any(json.loads(store.get(key))[2] for key in keys)
    except RuntimeError:
        return False


def _key(rank: int, place: str) -> str:
    return f"ghostclip/left/{rank}/{place}"


def _leave(place: str, error: Exception, *, waited: bool) -> None:
    if not _torch.several_ranks() or distributed.get_world_size() == 1:
        return
    _left.group, _left.place, _left.reason, _left.is_alone = id(distributed.group.WORLD), place, str(error), False
    _say(place, error, waited=waited)


def _say(place: str, error: Exception, *, waited: bool) -> None:
    # The process that holds the store may be gone: then the error that counts is this rank's own.
    with contextlib.suppress(RuntimeError):
        said = json.dumps([type(error).__name__, str(error), waited])
        _torch.meeting_store().set(_key(distributed.get_rank(), place), said)


def _reason_of_others(place: str) -> GhostClipError | None:
    """Return why another rank has left a point of the program; None if nobody has published a reason."""
    if not _torch.several_ranks():
        return None
    store: Any = _torch.meeting_store()
    for rank in range(distributed.get_world_size()):
        with contextlib.suppress(RuntimeError):
            said = rank != distributed.get_rank() and store.check([_key(rank, place)]) and store.get(_key(rank, place))
            kind, message, waited = json.loads(said) if said else ("", "", True)
            if not waited:
                return elsewhere(rank, kind, message)
    return None
