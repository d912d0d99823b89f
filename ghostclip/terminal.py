"""What programs say on the terminal while they work, and the options that their tables share."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from ghostclip._files import require_picture, require_writable, write_text
from ghostclip.errors import InvalidOptionError

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


Options = dict[str, dict[str, Any]]
"""Keywords of argparse by option."""


def gigabytes(text: str) -> int:
    """Return the bytes of a size such as ``"24"`` or ``"24GB"``; argparse says what is none."""
    try:
        size = float(text.upper().removesuffix("B").removesuffix("G"))
    except ValueError:
        size = 0.0
    if not 0 < size < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory in GB, such as 24 or 24GB")
    return int(size * 10**9)


OPTIMIZER: Final[Options] = {"--optimizer": {
    "choices": ("adamw", "momentum", "sgd"), "default": "adamw",
    "help": "whose state is counted; momentum is SGD with it (default: %(default)s)",
}}  # fmt: skip
TRAINABLE: Final[Options] = {
    "--trainable": {"metavar": "REGEX", "default": "", "help": "train only parameters whose name it is found in"}
}
DELTA: Final[Options] = {
    "--delta": {"type": float, "metavar": "D", "default": 1e-5, "help": "delta of the guarantee (default: %(default)s)"}
}
FILE: Final[dict[str, Any]] = {"type": Path, "metavar": "FILE"}


def require_least(args: dict[str, Any], least: dict[str, int]) -> None:
    """Refuse numbers that are too small; what was left out is none."""
    for name, number in least.items():
        if args[name] is not None and args[name] < number:
            raise InvalidOptionError(f"--{name.replace('_', '-')} is {args[name]}: must be at least {number}")


def require_files(args: dict[str, Any]) -> None:
    """Refuse files of ``--plot`` and ``--json`` that could not be written, before anything is computed for them."""
    if args.get("plot") is not None:
        require_picture(args["plot"], "--plot")
    if args["json"] is not None and str(args["json"]) != "-":
        require_writable(args["json"], "--json")


def write_json(path: Path | None, values: dict[str, Any], *, indent: int = 2) -> None:
    """Write values where ``--json`` says, which may be nowhere, or standard output."""
    text = json.dumps(values, indent=indent)
    if str(path) == "-":
        print(text)
    elif path is not None:
        write_text(path, text + "\n")


def write_page(path: Path | None, page: Any) -> None:
    """Print a page and write its numbers where ``--json`` says; on standard output they take its place."""
    if str(path) != "-":
        print(page)
    write_json(path, page.as_dict(), indent=1)


@contextmanager
def quietly(what: str) -> Iterator[None]:
    """Show what is done and keep the log still: the page says what is slow."""
    logger = logging.getLogger("ghostclip.capture")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with Working(what):
            yield
    finally:
        logger.setLevel(level)
