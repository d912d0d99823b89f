"""Lines of a ledger: how one is written, and what is wrong with one that is not as it was written.

A line is a JSON object, a tab, and a hash that covers the object and the hash of the line before:

    hash_n = first 128 bits of SHA-256(hash_{n-1} ‖ newline ‖ object_n),   hash_{-1} = ""

Each object holds the ledger's identity and the number of the line. A line that was changed, repeated, moved, taken out,
or that belongs to another ledger therefore does not continue the line before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ghostclip.errors import ResumeError

FORMAT = 3
"""Version of what is written: 1 and 2 had lines that did not depend on each other."""
LEDGER, NUMBER, VERSION = "ledger", "line", "format"
_SEPARATOR = b"\t"
_HASH_DIGITS = 32
_RESTORE = "Restore the file, from a copy if there is one: without it ε is not known."


class LedgerPosition(NamedTuple):
    """Position in a ledger: its identity, its number of lines, and their hash."""

    ledger: str = ""
    """Its identity; empty before its first line."""
    lines: int = 0
    """Number of lines."""
    chained: str = ""
    """Hash of the last one."""


def encoded(values: Mapping[str, Any], after: LedgerPosition) -> tuple[bytes, LedgerPosition]:
    """Return the line of plain values that continues a ledger, with its end, and the new position."""
    numbered = {**values, LEDGER: after.ledger, NUMBER: after.lines}
    body = json.dumps(numbered, separators=(",", ":"), sort_keys=True).encode()
    chained = _hash_of(body, after.chained)
    return body + _SEPARATOR + chained.encode() + b"\n", LedgerPosition(after.ledger, after.lines + 1, chained)


def decoded(line: bytes, after: LedgerPosition, *, name: str) -> tuple[dict[str, Any], LedgerPosition]:
    """Return the values of a line without its end, and the new position."""
    # Refuse one that does not continue the ledger.
    body, _, written = line.rpartition(_SEPARATOR)
    if written != _hash_of(body, after.chained).encode():
        raise ResumeError(f"{name}, line {after.lines + 1}: {_what_is_wrong(line, after)}")
    values: dict[str, Any] = json.loads(body)
    if values.get(VERSION, FORMAT) != FORMAT:
        raise ResumeError(f"{name}: {_of_other_version(values[VERSION])}")
    return values, LedgerPosition(values[LEDGER], after.lines + 1, written.decode())


def is_whole(line: bytes, after: LedgerPosition) -> bool:
    """Return whether a line without its end continues the ledger."""
    body, _, written = line.rpartition(_SEPARATOR)
    return written == _hash_of(body, after.chained).encode()


def _hash_of(body: bytes, chained: str) -> str:
    return hashlib.sha256(chained.encode() + b"\n" + body).hexdigest()[:_HASH_DIGITS]


def _of_other_version(version: object) -> str:
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
