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
from typing import Any, Final

from ghostclip._files import require_picture, require_writable, write_text
from ghostclip.errors import InvalidOptionError

_FIRST, _TERMINAL, _LOG = 2.0, 0.5, 30.0


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr what is done and for how long: on a terminal one line that vanishes, else lines.

    Work that is done within two seconds shows nothing on a terminal, within thirty nothing in a log.
    """
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(what: str, done: threading.Event) -> None:
    stream, began = sys.stderr, time.monotonic()
    terminal = stream.isatty()
    shown, wait = False, _FIRST if terminal else _LOG
    while not done.wait(wait):
        shown, wait = True, _TERMINAL if terminal else _LOG
        text = f"{what}: {time.monotonic() - began:.0f} s"
        stream.write(f"\r\x1b[2K{text}" if terminal else f"{text}\n")
        stream.flush()
    if shown and terminal:
        stream.write("\r\x1b[2K")
        stream.flush()


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
        with working(what):
            yield
    finally:
        logger.setLevel(level)
