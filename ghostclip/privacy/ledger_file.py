"""The ledger on disk: one line for every release, safe on the disk before the release leaves the optimizer.

A line is a JSON object, a tab, and a hash that covers the object and the hash of the line before:

    hash_n = first 128 bits of SHA-256(hash_{n-1} ‖ newline ‖ object_n),   hash_{-1} = ""

Each object holds the ledger's identity and the number of the line. A line that was changed, repeated, moved, taken out,
or that belongs to another ledger therefore does not continue the line before it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import secrets
import socket
import stat
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ghostclip.accounting.history import Charge, joined
from ghostclip.distributed.agreement import announcing_error, from_first, gathered, is_first
from ghostclip.errors import CopyError, GhostClipError, InvalidOptionError, ResumeError
from ghostclip.privacy.budget import checked_charge

FORMAT = 3
"""Version of what is written: 1 and 2 had lines that did not depend on each other."""
LEDGER, NUMBER, VERSION = "ledger", "line", "format"
_SEPARATOR = b"\t"
_HASH_DIGITS = 32
_RESTORE = "Restore the file, from a copy if there is one: without it ε is not known."


class LedgerPosition(NamedTuple):
    """Position in a ledger: its identity, its lines and their hash, and how many releases are among them."""

    ledger: str = ""
    """Its identity; empty before its first line."""
    lines: int = 0
    """Number of lines."""
    chained: str = ""
    """Hash of the last one."""
    releases: int = 0


def encoded(values: Mapping[str, Any], after: LedgerPosition) -> bytes:
    """Return the line of plain values that continues a ledger, with its end."""
    numbered = {**values, LEDGER: after.ledger, NUMBER: after.lines}
    body = json.dumps(numbered, separators=(",", ":"), sort_keys=True).encode()
    return body + _SEPARATOR + _hash_of(body, after.chained).encode() + b"\n"


def decoded(line: bytes, after: LedgerPosition, *, name: str) -> tuple[dict[str, Any], LedgerPosition]:
    """Return the values of a line without its end, and the new position."""
    # Refuse one that does not continue the ledger.
    body, _, written = line.rpartition(_SEPARATOR)
    if not is_whole(line, after):
        raise ResumeError(f"{name}, line {after.lines + 1}: {_what_is_wrong(line, after)}")
    values: dict[str, Any] = json.loads(body)
    if values.get(VERSION, FORMAT) != FORMAT:
        raise ResumeError(f"{name}: {_of_other_version(values[VERSION])}")
    releases = after.releases + ("run" in values)
    return values, LedgerPosition(values[LEDGER], after.lines + 1, written.decode(), releases)


def is_whole(line: bytes, after: LedgerPosition) -> bool:
    """Return whether a line without its end continues the ledger."""
    body, _, written = line.rpartition(_SEPARATOR)
    return written == _hash_of(body, after.chained).encode()


def _hash_of(body: bytes, chained: str) -> str:
    """Return the hash of a line over all lines before it."""
    return hashlib.sha256(chained.encode() + b"\n" + body).hexdigest()[:_HASH_DIGITS]


def _of_other_version(version: object) -> str:
    """Return the error text for a ledger of another format."""
    newer = isinstance(version, int) and version > FORMAT
    remedy = "Use that version to continue." if newer else "Finish that training with the version that began it."
    return (
        f"a ledger of format {version}, written by {'a newer' if newer else 'another'} version of ghostclip. {remedy}"
    )


def _what_is_wrong(line: bytes, after: LedgerPosition) -> str:
    """Return why a line does not continue the ledger, and the remedy."""
    try:
        values = json.loads(line.rpartition(_SEPARATOR)[0])
    except ValueError:
        values = None
    if not isinstance(values, dict):
        return f"the ledger is damaged: this is no line of one. {_RESTORE}"
    version = values.get(VERSION, values.get("version", FORMAT))
    if version != FORMAT:
        return _of_other_version(version)
    if after.lines and values.get(LEDGER) != after.ledger:
        return f"belongs to another ledger ({values.get(LEDGER)}; this is {after.ledger}). {_RESTORE}"
    number = values.get(NUMBER, after.lines)
    if number != after.lines:
        kind = "missing" if isinstance(number, int) and number > after.lines else "repeated or out of order"
        return f"carries the number {number} where {after.lines} is due: lines are {kind}. {_RESTORE}"
    return f"the ledger is damaged: this line, or the one before it, was changed after it was written. {_RESTORE}"


if sys.platform != "win32":
    import fcntl


class Entry(NamedTuple):
    """One release."""

    run: str
    """Run that the noise is of: a digest of the noise key."""
    number: int
    """Number of releases that the run made before it."""
    events: tuple[Charge, ...]
    """Its cost."""
    fingerprint: str
    """Digest of what was released."""


class LedgerFile:
    """An append-only file of releases and of the mechanisms they belong to.

    Privacy:
        `append` returns only when the line is on the disk (fsync), on every rank. What is released afterwards is
        therefore counted, whatever happens: a crash in between over-counts, nothing under-counts. The file alone cannot
        tell that whole lines were cut off its end; whoever knew them can (`require`: checkpoints, and this object while
        it is open).
        The file holds no secrets.
    """

    # Reading it needs no lock; writing takes the file for this object (`lock`), until `close` or the end of the
    # process. Each line has the ledger's identity, its number, and a hash over all lines before it (see
    # `is_whole`). Half a line at the end was never followed by its release, because a line is on the disk before
    # that: it is not read, and cut off before the next is written. Ranks of one training have one ledger (`share`):
    # rank 0 alone opens, locks and writes the file. `lock`, `begin_segment` and `append` are then called on all ranks,
    # which get the lines that rank 0 has written, or its error. That is one exchange for each: no exchange of the step
    # can carry a line, because it contains a digest of the noisy sum over all ranks and must be on the disk before any
    # of them goes on. `alone`: errors of the file are raised here, and not in `require_alone` or `share`, where it is
    # known who has to be told.
    def __init__(self, path: str | os.PathLike[str], *, alone: bool = True) -> None:
        """Read a ledger without locking it; `alone=False` defers errors to `require_alone` or `share`."""
        self.path = Path(os.path.realpath(path))
        self.given = os.fspath(path)
        self.shared = False  # whether ranks share it
        self._follows = False  # whether another rank writes for this one
        self._file: IO[bytes] | None = None
        self._owner = 0  # process that has locked the file; 0 if none
        self._pending = b""  # the line being written
        self._told = 0  # bytes that all ranks have
        self._wrong: Exception | None = None
        self._forget()
        try:
            _refuse_irregular(self.path, ledger=path)
            if self.path.exists():
                self._read(self.path.read_bytes())
        except (GhostClipError, OSError) as error:
            if alone:
                raise
            self._wrong = error

    def require_readable(self) -> None:
        """Raise the constructor's error, if that was deferred."""
        if self._wrong is not None:
            # Another one each time: ranks mark an error that all of them were told of.
            raise type(self._wrong)(*self._wrong.args) from self._wrong

    def require_alone(self) -> None:
        """Refuse a ledger that ranks share: what one of them released by itself would not be written."""
        self.require_readable()
        if self.shared:
            raise InvalidOptionError(
                f"{self.path}: this is the ledger of a training on several ranks, and the loader that is given now is "
                "this rank's own. Use a PrivacyEngine, and a ledger, of its own for what a rank trains by itself."
            )

    def share(self, *, fresh: bool) -> bool:
        """Make rank 0's file the ledger of all ranks; return whether this rank had read another content."""
        # Return whether this rank's content was different. Called on all. Files of the other ranks are not used, even
        # if the path leads to another one there. `fresh`: this rank has accounted for nothing but what it has read.
        if self.shared:
            return False
        self._follows = not is_first()
        before = self._places[-1]
        with announcing_error("ledger"):
            if not self._follows:
                self.require_readable()
        positions = gathered("place in the ledger", (tuple(before), fresh))
        others = [rank for rank, (position, _) in enumerate(positions) if position != positions[0][0]]
        for rank in others:
            if not positions[rank][1]:
                raise ResumeError(
                    f"{self.path}: rank {rank} has accounted for releases that the ledger of rank 0 does not hold. "
                    "Make a PrivacyEngine anew on every rank, call make_private, then load the checkpoint."
                )
        if others:
            content = from_first("content of the ledger", lambda: self.path.read_bytes() if self._end else b"")
            if self._follows:
                with announcing_error("ledger"):
                    self._forget()
                    if content:
                        self._read(content)
        self.shared, self._told, self._wrong = True, self._end, None
        return self._places[-1] != before

    def _on_first_rank(self, work: Callable[[], None]) -> None:
        """Write on rank 0 alone if ranks share the ledger, and give all of them the lines written."""
        if not self.shared:
            work()
            return

        def told() -> bytes:
            work()
            assert self._file is not None, "open"
            return _all_of(self._file, start=self._told)[: self._end - self._told]

        with announcing_error("line of the ledger"):
            if self._follows == is_first():
                raise ResumeError(
                    f"{self.path}: this ledger is written by rank 0 of a process group that is no more. Make a "
                    "PrivacyEngine anew for what is trained without it."
                )
        *lines, _ = from_first("line of the ledger", told).split(b"\n")
        if self._follows:
            for line in lines:
                self._parse_line(line)
        self._told = self._end

    def _forget(self) -> None:
        """Reset to a ledger without lines."""
        self.entries: list[Entry] = []
        self.mechanisms: list[dict[str, Any]] = []
        self.counts: list[int] = []  # releases under each of them
        self.compiled: dict[str, dict[str, Any]] = {}  # by run, which of its releases graphs compute
        self._known: dict[tuple[str, int], str] = {}  # fingerprints, by run and number of the release
        self._places = [LedgerPosition()]  # behind each line
        self._holder: Mapping[str, Any] = {}  # process and host that locked the file last
        self._end = 0  # bytes of whole lines

    def _read(self, content: bytes) -> None:
        """Parse the whole lines of a file's content."""
        if not content:
            raise ResumeError(
                f"{self.path}: the ledger is empty, and none that was begun is: it was emptied, or is another "
                "program's file. Restore it; if nothing was ever released with it, delete it."
            )
        *whole, torn = content.split(b"\n")
        for line in whole:
            self._parse_line(line)
        # Half a line is what a crash leaves. One that lacks nothing but its end may have been released: it counts.
        complete = next(
            (torn[:cut] for cut in (len(torn), -1) if torn and is_whole(torn[:cut], self._places[-1])), None
        )
        if complete is not None:
            self._parse_line(complete)
        elif not whole:
            decoded(torn, self._places[-1], name=str(self.path))

    def _parse_line(self, line: bytes) -> None:
        """Parse a line of the file; refuse one that does not continue the ledger."""
        values, position = decoded(line, self._places[-1], name=str(self.path))
        if "mechanism" in values:
            self.mechanisms.append(values["mechanism"])
            self.counts.append(0)
        elif "opened" in values:
            self._holder = values["opened"]
        elif "compiled" in values:
            self.compiled[values["compiled"]["run"]] = values["compiled"]
        elif "run" in values:
            events = tuple(checked_charge(charge) for charge in values["events"])
            entry = Entry(values["run"], int(values["number"]), events, values["fingerprint"])
            self.entries.append(entry)
            self._known[entry.run, entry.number] = entry.fingerprint
            if self.counts:
                self.counts[-1] += 1
        self._places.append(position)
        self._end += len(line) + 1

    def find(self, run: str, number: int) -> str | None:
        """Return the fingerprint of a run's release of this number if the ledger has it, else None."""
        return self._known.get((run, number))

    def position(self) -> dict[str, Any]:
        """Return the ledger's position, in plain values for a checkpoint and `require`."""
        return self._places[-1]._asdict()

    def require(self, saved: Mapping[str, Any]) -> None:
        """Refuse a ledger that is another one, or lacks lines that it had at a saved `place`."""
        was, now = LedgerPosition(**saved), self._places[-1]
        if now.releases < was.releases or (was.lines > now.lines and was.ledger == now.ledger):
            raise ResumeError(
                f"{self.path}: the ledger holds {now.releases} releases in {now.lines} lines; what is loaded was "
                f"saved after {was.releases} in {was.lines}: lines were cut off, or it is another training's. "
                "Restore the ledger that belongs to it: without it ε is not known."
            )
        if was.lines and (was.lines > now.lines or self._places[was.lines] != was):
            raise ResumeError(
                f"{self.path}: this is the ledger {now.ledger}; what is loaded was saved with {was.ledger}, whose "
                f"line {was.lines} is not here. Give the engine the ledger that belongs to it: without it ε is not "
                "known."
            )

    def releases_at(self, saved: Mapping[str, Any]) -> list[Entry]:
        """Return the releases that the ledger had at a saved `place`, which `require` has accepted."""
        return self.entries[: self._places[saved["lines"]].releases]

    def begin_segment(self, mechanism: Mapping[str, Any]) -> None:
        """Set the mechanism of the following releases, in plain values; a line is written only if it is another one."""
        plain = json.loads(json.dumps(dict(mechanism)))
        if [plain] != self.mechanisms[-1:]:
            self._write({"mechanism": plain})

    def record_compiled(self, run: str, compiled: Mapping[str, Any]) -> None:
        """Write which of a run's releases graphs are about to compute."""
        self._write({"compiled": {"run": run, **compiled}})

    def append(self, entry: Entry) -> None:
        """Write a release that is about to be made."""
        self._write(entry._asdict())

    def lock(self) -> None:
        """Lock the file for this object, making it if there is none; no effect if it is locked already."""
        self._on_first_rank(self._lock_file)

    def _lock_file(self) -> None:
        """Lock the file for this object; refuse one in use, or changed since it was read."""
        if self._file is not None:
            return
        if self._owner not in (0, os.getpid()):
            raise ResumeError(
                f"{self.path}: this process was forked from process {self._owner}, whose ledger it is. Make a "
                "PrivacyEngine with a ledger of its own in each process that trains."
            )
        begins = self._end == 0 and not self.path.exists()
        file = self._begun() if begins else self._opened()
        # Not by the object's destructor, which complains of files that are still open.
        self._close = weakref.finalize(self, file.close)
        self._file, self._owner = file, os.getpid()
        try:
            self._read(_all_of(file)) if begins else self._require_as_read()
            # The end of a line that lacks nothing else; then what is left of half a line.
            _write_all(file, b"\n", at=self._end - 1)
            self._cut_off_rest()
            self._write_line({"opened": {"process": os.getpid(), "host": socket.gethostname()}})
        except BaseException:
            self.close()
            raise
        _HELD.add(self)

    def _require_as_read(self) -> None:
        """Refuse a file that somebody has written to since this object has read it."""
        known, now = self._places[-1], LedgerFile(self.path)._places[-1]
        if known != now:
            raise ResumeError(
                f"{self.path}: the ledger had {known.lines} lines when it was read and has {now.lines}, or others, "
                "now. Make the PrivacyEngine anew, which reads them."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles while this process writes: a file has one writer."""
        if self._file is not None:
            raise CopyError(f"{self.path}: a PrivacyEngine that writes to a ledger cannot be copied. Make one anew.")
        return vars(self).copy()

    def close(self) -> None:
        """Unlock the file; the next line that is written locks it again, if nobody else has written."""
        _HELD.discard(self)
        if self._file is not None:
            self._close()
        self._file, self._owner, self._pending = None, 0, b""

    def _begun(self) -> IO[bytes]:
        """Make and lock the file, with its first line: under its name it is never empty."""
        line = encoded({VERSION: FORMAT}, LedgerPosition(ledger=secrets.token_hex(8)))
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.unfinished")
        file = unfinished.open("w+b", buffering=0)
        try:
            _lock(file)
            file.write(line)
            _to_disk(file.fileno())
            _publish(unfinished, self.path)
        except BaseException:
            file.close()
            raise
        finally:
            unfinished.unlink(missing_ok=True)
        _folder_to_disk(self.path.parent)
        return file

    def _opened(self) -> IO[bytes]:
        """Open and lock the file that is there."""
        try:
            file = self.path.open("r+b", buffering=0)
        except FileNotFoundError as error:
            raise self._lost("is gone: it was deleted or moved") from error
        try:
            _lock_unless_forgotten(file)
        except OSError as error:
            file.close()
            holder = LedgerFile(self.path)._holder
            who = f"process {holder.get('process', '?')} on {holder.get('host', '?')}"
            here = " (this one)" if holder.get("process") == os.getpid() else ""
            raise ResumeError(
                f"{self.path}: {who}{here} is writing to this ledger, and two writers would each miss the other's "
                "releases. Wait until it has ended, or close() its engine; give each training a ledger of its own. "
                "The ranks of one training share one if make_private is called after init_process_group."
            ) from error
        return file

    def _write(self, values: Mapping[str, Any]) -> None:
        """Write one line; it is on the disk when this returns."""
        self._on_first_rank(lambda: self._write_line(values))

    def _write_line(self, values: Mapping[str, Any]) -> None:
        """Write one line; nothing of it is read if this raises."""
        self._lock_file()
        file = self._file
        assert file is not None, "locked"
        self._require_same_file(file)
        self._cut_off_rest()
        line = encoded(values, self._places[-1])
        self._pending = line
        try:
            _write_all(file, line, at=self._end)
            _to_disk(file.fileno())
        except BaseException:
            # What is left where this fails too is cut off before the next line is written.
            with suppress(OSError):
                os.ftruncate(file.fileno(), self._end)
            raise
        self._pending = b""
        self._parse_line(line[:-1])

    def _require_same_file(self, file: IO[bytes]) -> None:
        """Refuse to write if the file was deleted, moved, replaced, shortened, or written to by somebody else."""
        try:
            there = self.path.stat()
        except OSError as error:
            raise self._lost("is gone: it was deleted or moved") from error
        opened = os.fstat(file.fileno())
        if (there.st_dev, there.st_ino) != (opened.st_dev, opened.st_ino):
            raise self._lost("was replaced by another file")
        if opened.st_size < self._end:
            raise self._lost(f"was shortened from {self._end} to {opened.st_size} bytes")
        tail = (self._places[-1].chained + "\n").encode()
        rest = _all_of(file, start=self._end - len(tail))
        if not rest.startswith(tail):
            raise self._lost("was changed")
        if not self._pending.startswith(rest[len(tail) :]):
            raise self._lost("was written to by somebody else")

    def _lost(self, what: str) -> ResumeError:
        """Return the error for a file that was changed while this process wrote to it."""
        return ResumeError(
            f"{self.path}: the ledger {what} while this process was writing to it, after {len(self.entries)} releases "
            "in it. Put it back as it was; the step that was about to be written is not released."
        )

    def _cut_off_rest(self) -> None:
        """Cut off half a line, so that the next one cannot join it."""
        assert self._file is not None, "locked"
        if os.fstat(self._file.fileno()).st_size > self._end:
            os.ftruncate(self._file.fileno(), self._end)
            _to_disk(self._file.fileno())
        self._pending = b""


_HELD: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the parent's ledgers in a forked process: a lock must end with the process that took it."""
    for ledger in list(_HELD):
        owner = ledger._owner
        ledger.close()
        ledger._owner = owner


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _refuse_irregular(path: Path, *, ledger: str | os.PathLike[str]) -> None:
    """Refuse paths that no line can be written to: folders, devices, pipes, sockets."""
    # A device that a shell has redirected to a file is one all the same.
    root, *below = (*Path(ledger).absolute().parts[1:], "")
    regular = root != "proc" and (root != "dev" or below[:1] == ["shm"])
    try:
        regular = regular and stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        regular = False
    if not regular:
        raise InvalidOptionError(
            f"ledger={os.fspath(ledger)!r}: a ledger must be a regular file, and this is a folder, a device, a pipe or "
            "a socket, or lies below a file. Name a file."
        )
    if not path.parent.is_dir():
        raise InvalidOptionError(
            f"ledger={os.fspath(ledger)!r}: there is no folder {path.parent}. A new ledger is a new account: make the "
            "folder first, or correct the path if the ledger exists."
        )


def _lock(file: IO[bytes]) -> None:
    """Lock a file for as long as it is open, or raise OSError; a killed process has no lock."""
    if sys.platform != "win32":
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_unless_forgotten(file: IO[bytes]) -> None:
    """Lock a file, even if an unused engine in a reference cycle still locks it."""
    try:
        _lock(file)
    except OSError:
        gc.collect()
        _lock(file)


def _publish(unfinished: Path, path: Path) -> None:
    """Rename a finished file to a path that must not exist yet."""
    try:
        path.hardlink_to(unfinished)
    except FileExistsError as error:
        raise ResumeError(f"{path}: another process has begun this ledger at the same moment. Name another.") from error
    except OSError:
        # A file system without links.
        unfinished.rename(path)


def _all_of(file: IO[bytes], *, start: int = 0) -> bytes:
    """Return a file's content from an offset on."""
    file.seek(start)
    return file.read()


def _write_all(file: IO[bytes], line: bytes, *, at: int) -> None:
    """Write a line at an offset; an unbuffered file may take it in several parts."""
    file.seek(at)
    while line:
        line = line[file.write(line) :]


def _to_disk(descriptor: int) -> None:
    """Flush a file to the disk."""
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
    """Return the charges of releases, consecutive equal ones as one."""
    return joined(charge for entry in entries for charge in entry.events)
