"""Stopping on Ctrl-C at the next safe place: between two private steps, never inside one."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Context in which the first Ctrl-C (or SIGTERM) only sets ``requested``; the second ends the program at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only, and refuses handlers elsewhere.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step (once more: at once) …", file=sys.stderr, flush=True)
