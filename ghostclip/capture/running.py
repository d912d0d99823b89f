"""A forward that is running: what was switched on when it began and must be switched off however it ends.

A hook after the forward ends it, also after an exception, but not after ``KeyboardInterrupt``: torch calls no hook
then. Two safety nets catch that. A token among the forward's arguments notices when the call's frames are gone, and
whoever enters next looks whether the call is still on the stack.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import ref

from ghostclip import _torch


class Token(dict[str, Any]):
    """The keyword arguments of the outermost call: they live as long as its frames do."""

    expired: Callable[[], None] | None = None

    def __del__(self) -> None:
        """Report that nobody refers to the arguments any more."""
        if self.expired is not None:
            self.expired()


class Running:
    """The outermost module call."""

    def __init__(self, module: Any, kwargs: dict[str, Any], expired: Callable[[], None]) -> None:
        # `expired` is called when the call's frames are gone and it was never ended.
        self.module = module
        self.token: Token | None = Token(kwargs)  # referred to by the call's frames and by nobody else

        def check() -> None:
            # Somebody else's hook may have put other arguments in the token's place.
            if not _calls_of(module):
                expired()

        self.token.expired = check

    def was_broken_off(self, module: Any) -> bool:
        """Return whether a new call of the same module, which has begun, shows that this one is over."""
        return module is self.module and _calls_of(module) == 1

    def hand_over(self) -> Token:
        """Return the token, to which only the call's frames refer from now on."""
        token, self.token = self.token, None
        assert token is not None
        self._last = ref(token)
        return token

    def end(self) -> None:
        """Let the token expire unnoticed."""
        token = self._last() if self.token is None else self.token
        if token is not None:
            token.expired = None


def _calls_of(module: Any) -> int:
    """Return how many calls of a module this thread is executing."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += _torch.is_call_of(frame, module)
        frame = frame.f_back
    return count
