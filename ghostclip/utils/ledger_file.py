"""The ledger on disk: one line for every release, safe on the disk before the release leaves the optimizer."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ghostclip.errors import ResumeError
from ghostclip.utils.charges import Charge, checked_charge, joined

VERSION = 2
"""Version of what is written: 1 knew Poisson, full and shuffled batches only."""
_SEPARATOR = b"\t"


class Entry(NamedTuple):
    """One release."""

    run: str
    """Whose noise it uses: a digest of the noise key."""
    number: int
    """How many releases that run made before it."""
    events: tuple[Charge, ...]
    """What it costs."""
    fingerprint: str
    """Digest of what was released."""


class LedgerFile:
    """An append-only file of releases and of the mechanisms they belong to.

    Every line carries a checksum. A line that a crash has torn was never followed by its release, because a line is on
    the disk before that; a damaged line before the last one is an error.

    Privacy:
        `append` returns only when the line is on the disk (fsync). What is released afterwards is therefore counted,
        whatever happens: a crash in between over-counts, nothing under-counts. The file holds no secrets.

    Args:
        path: The file; made, with its folder, when the first line is written.

    Attributes:
        entries: All releases, in order.
        mechanisms: What they belong to, in order.

    Raises:
        ResumeError: If the file is damaged or of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.entries: list[Entry] = []
        self._known: dict[tuple[str, int], str] = {}
        self.mechanisms: list[dict[str, Any]] = []
        self._read()

    def _read(self) -> None:
        """Take in what lies there, and cut off a torn last line."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), start=1):
            self._take(_decode(line, place=f"{self.path}, line {number}"))
        if torn:
            with self.path.open("r+b") as file:
                file.truncate(len(content) - len(torn))
                _to_disk(file.fileno())

    def _take(self, values: Mapping[str, Any]) -> None:
        if "mechanism" in values:
            self.mechanisms.append(values["mechanism"])
            return
        events = tuple(checked_charge(charge) for charge in values["events"])
        entry = Entry(values["run"], int(values["number"]), events, values["fingerprint"])
        self.entries.append(entry)
        self._known[entry.run, entry.number] = entry.fingerprint

    def find(self, run: str, number: int) -> str | None:
        """Return the fingerprint of a release that was made before, or None.

        Args:
            run: Whose noise it uses.
            number: Its number in that run.

        Returns:
            The fingerprint.
        """
        return self._known.get((run, number))

    def begin_segment(self, mechanism: Mapping[str, Any]) -> None:
        """Say which mechanism the following releases belong to; writes a line only if it is another one.

        Args:
            mechanism: Plain values by name.
        """
        plain = json.loads(json.dumps(dict(mechanism)))
        if [plain] != self.mechanisms[-1:]:
            self._write({"version": VERSION, "mechanism": plain})

    def append(self, entry: Entry) -> None:
        """Write a release that is about to be made.

        Args:
            entry: The release.
        """
        self._write(entry._asdict())

    def _write(self, values: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        with self.path.open("ab") as file:
            before = file.tell()
            try:
                file.write(_encode(values))
                file.flush()
                _to_disk(file.fileno())
            except BaseException:
                # Half a line in the middle would make the file unreadable; a whole one would count twice at worst.
                file.truncate(before)
                raise
        if fresh:
            _folder_to_disk(self.path.parent)
        self._take(values)


def _encode(values: Mapping[str, Any]) -> bytes:
    body = json.dumps(values, separators=(",", ":"), sort_keys=True).encode()
    return body + _SEPARATOR + f"{zlib.crc32(body):08x}".encode() + b"\n"


def _decode(line: bytes, *, place: str) -> dict[str, Any]:
    body, _, checksum = line.rpartition(_SEPARATOR)
    if checksum != f"{zlib.crc32(body):08x}".encode():
        raise ResumeError(f"{place}: the ledger is damaged. Restore the file: without it ε is not known.")
    values = json.loads(body)
    if values.get("version", VERSION) > VERSION:
        raise ResumeError(f"{place}: written by a newer version of ghostclip. Use that version to continue.")
    return dict(values)


def _to_disk(descriptor: int) -> None:
    os.fsync(descriptor)


def _folder_to_disk(folder: Path) -> None:
    """Make a new file's name survive a power cut, where folders can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def total(entries: Sequence[Entry]) -> list[Charge]:
    """Return what releases cost together.

    Args:
        entries: Releases.

    Returns:
        Charges; consecutive equal ones are one.
    """
    return joined(charge for entry in entries for charge in entry.events)
