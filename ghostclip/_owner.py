"""Who may draw from a source of randomness or release: the one object, in the one process, that it was made for.

A copy, an unpickled object and a forked process hold the same key and the same position, and would draw the same noise
and the same batches again: the difference of two such releases has no noise. They are noticed where something is drawn
or released, not where they are made, since frameworks copy and fork what they never use.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple

from ghostclip.errors import CopyError


class _Process(NamedTuple):
    """A process as its children see it: they have another number, or another token once they were forked by Python."""

    number: int
    token: object


_process = _Process(os.getpid(), object())


def _begin_process() -> None:
    global _process  # noqa: PLW0603 - there is one process
    _process = _Process(os.getpid(), object())


def _this_process() -> _Process:
    # A library written in C may fork without Python's knowing.
    if _process.number != os.getpid():
        _begin_process()
    return _process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)


class Owner:
    """The object and the process that alone may go on from a state; held by that object.

    Privacy:
        What a copy of the object, an unpickled one or a forked process would draw has been, or will be, drawn by the
        original too. All of these are refused by `require`. A state that is saved and loaded on purpose (`state_dict`)
        is a continuation, and is not.

    Args:
        holder: The object.
    """

    def __init__(self, holder: object) -> None:
        self._holder: weakref.ref[object] | None = weakref.ref(holder)
        self._process: _Process | None = _this_process()

    def require(self, holder: object, *, remedy: str) -> None:
        """Refuse everybody else.

        Args:
            holder: Who is about to go on.
            remedy: What to do instead, a sentence.

        Raises:
            CopyError: If it is a copy of the object that this was made for, or in another process.
        """
        self._refuse_copy(holder, remedy)
        if self._process is not _this_process():
            raise CopyError(
                f"this {type(holder).__name__} was made in another process, of which process {os.getpid()} is a fork: "
                f"both would go on from the same state, with the same randomness and the same account. {remedy}"
            )

    def move_here(self, holder: object, *, remedy: str) -> None:
        """Let this process go on, as what it goes on from was set in it; never a copy, which may share more than that.

        Args:
            holder: Who is about to go on.
            remedy: What to do instead, a sentence.

        Raises:
            CopyError: If it is a copy of the object that this was made for.
        """
        self._refuse_copy(holder, remedy)
        self._process = _this_process()

    def _refuse_copy(self, holder: object, remedy: str) -> None:
        if self._holder is None or self._holder() is not holder:
            raise CopyError(
                f"this {type(holder).__name__} is a copy (copy.copy, copy.deepcopy, pickle): it would go on from the "
                f"same state as the original, with the same randomness and the same account. {remedy}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles be owned by nobody."""
        return (_nobody, ())


def _nobody() -> Owner:
    owner = Owner.__new__(Owner)
    owner._holder = owner._process = None
    return owner
