"""What a program says on the terminal while it works."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_FIRST, _TERMINAL, _LOG = 2.0, 0.5, 30.0


class Working:
    """Context that shows on stderr what is done and for how long: on a terminal one line that vanishes, else lines.

    Work that is done within two seconds shows nothing on a terminal, within thirty nothing in a log.

    Args:
        what: What is done, such as "searching the noise".
        stream: Where to write; None for stderr.
    """

    def __init__(self, what: str, *, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Working:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _show(self) -> None:
        terminal = self._stream.isatty()
        shown, wait = False, _FIRST if terminal else _LOG
        while not self._done.wait(wait):
            shown, wait = True, _TERMINAL if terminal else _LOG
            text = f"{self._what}: {time.monotonic() - self._began:.0f} s"
            self._stream.write(f"\r\x1b[2K{text}" if terminal else f"{text}\n")
            self._stream.flush()
        if shown and terminal:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
