"""Reading text: a file, a folder, ``.jsonl``, ``.csv``, or the documentation that ships with Python.

Whatever cannot be read whole is an error that names file and line: a private run must not go on with a part of its
data.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ghostclip._validate import did_you_mean
from ghostclip.errors import DataError

TABLE_SUFFIXES = frozenset({".jsonl", ".csv", ".tsv"})
READ_SUFFIXES = TABLE_SUFFIXES | {".txt", ".text", ".md", ".rst", ".tex", ".py"}
_Row = Mapping[str, object]


def read_documents(path: Path | None, *, text_column: str = "text") -> list[str]:
    """Return the documents of a source that hold more than white space, in an order that no machine decides."""
    if path is None:
        documents = _python_documentation()
    elif path.exists():
        documents = [text for file in _text_files(path) for text in _read_file(file, text_column)]
    else:
        raise DataError(f"{path}: no such file or folder")
    found = [text for text in documents if text.strip()]
    if not found:
        raise DataError(f"{path}: holds no text, so there is nothing to train on")
    return found


def read_rows(path: Path | None, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the columns of every row of a table; numbers and booleans are taken as their text, none may be empty."""
    if path is None:
        raise DataError(f"--data: needed, a .jsonl, .csv or .tsv file with the columns {', '.join(columns)}")
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder; name a file' if path.is_dir() else 'no such file'}")
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(f"{path}: the columns {', '.join(columns)} are read from .jsonl, .csv or .tsv files")
    rows = []
    for place, row in _table(path):
        cells = tuple(_cell(row, column, place, (str, int, float)) for column in columns)
        empty = [column for column, text in zip(columns, cells, strict=True) if not text.strip()]
        if empty:
            raise DataError(f"{place}: {empty[0]!r} is empty; mend the row or leave it out")
        rows.append(cells)
    if not rows:
        raise DataError(f"{path}: holds no row, so there is nothing to train on")
    return rows


def describe_source(path: Path | None) -> str:
    """Return the name of a source, for people."""
    return "Python's own documentation (pydoc_data.topics)" if path is None else str(path)


def _python_documentation() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(f"this Python ships without pydoc_data.topics ({error}): give a text with --data") from error
    return [topics[name] for name in sorted(topics)]


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files: list[Path] = []
    for root, folders, names in os.walk(path, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    found = sorted(file for file in files if file.suffix.lower() in READ_SUFFIXES)
    if not found:
        raise DataError(f"{path}: no text file in this folder (looked for {' '.join(sorted(READ_SUFFIXES))})")
    return found


def _read_file(path: Path, text_column: str) -> list[str]:
    if path.suffix.lower() in TABLE_SUFFIXES:
        return [_cell(row, text_column, place, (str,)) for place, row in _table(path)]
    if path.suffix.lower() == ".json":
        raise DataError(f"{path}: .json is not read; write one object per line and name the file .jsonl")
    return [_decode(path)]


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        _unreadable(error)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from error


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _table(path: Path) -> Iterator[tuple[str, _Row]]:
    """Yield the rows of a file with the place of each."""
    text, suffix = _decode(path), path.suffix.lower()
    if suffix != ".jsonl":
        yield from _csv(path, text, delimiter="," if suffix == ".csv" else "\t")
        return
    # Not splitlines(): JSON strings may hold U+2028 and its like, which are no line ends in a .jsonl file.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: holds a {type(row).__name__}, not an object with named fields")
        yield f"{path}, line {number}", row


def _csv(path: Path, text: str, *, delimiter: str) -> Iterator[tuple[str, _Row]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    limit = csv.field_size_limit(max(len(text), 131072))
    try:
        for row in reader:
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a table ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _cell(row: _Row, column: str, place: str, kinds: tuple[type, ...]) -> str:
    if column not in row:
        present = [str(name) for name in row]
        raise DataError(
            f"{place}: no column {column!r} (found: {', '.join(present) or 'none'})"
            f"{did_you_mean(column, present)}; name it with --text-column, --label-column, --prompt-column or "
            "--answer-column"
        )
    value = row[column]
    if value is not None and not isinstance(value, kinds):
        raise DataError(f"{place}: {column!r} holds a {type(value).__name__}, not text")
    return "" if value is None else str(value)
