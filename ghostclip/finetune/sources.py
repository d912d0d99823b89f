"""Reading text: a file, a folder, ``.jsonl``, ``.csv``, or the documentation that ships with Python.

Each function gives a list of documents (``str``). Whatever cannot be read whole is an error that names file and line:
a private run must not go on with a part of its data.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ghostclip._validate import did_you_mean
from ghostclip.errors import DataError

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".py"})
TABLE_SUFFIXES = frozenset({".jsonl", ".csv", ".tsv"})


def read_documents(path: Path | None, *, text_column: str = "text") -> list[str]:
    """Read all documents of a source.

    Args:
        path: A text file, a folder of text files (searched to any depth), a ``.jsonl``, ``.csv`` or ``.tsv`` file
            whose rows are documents, or ``None`` for the topics of Python's own documentation.
        text_column: The field that holds the text of a row.

    Returns:
        The documents that hold more than white space, in an order that does not depend on the machine.

    Raises:
        DataError: The source is missing, unreadable, not UTF-8, malformed, without the column, or empty.
    """
    if path is None:
        documents = _python_documentation()
    elif path.is_dir():
        documents = [text for file in _text_files(path) for text in _read_file(file, text_column)]
    elif path.is_file():
        documents = _read_file(path, text_column)
    else:
        raise DataError(f"{path}: no such file or folder")
    kept = [text for text in documents if text.strip()]
    if not kept:
        raise DataError(f"{path}: holds no text, so there is nothing to train on")
    return kept


def read_rows(path: Path | None, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Read the rows of a table of text.

    Args:
        path: A ``.jsonl``, ``.csv`` or ``.tsv`` file.
        columns: The fields that are read; numbers and booleans are taken as their text.

    Returns:
        The fields of every row.

    Raises:
        DataError: The file is missing, of another kind, malformed, without a column or rows, or a field is empty.
    """
    if path is None:
        raise DataError(f"--data: needed, a .jsonl, .csv or .tsv file with the columns {', '.join(columns)}")
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder; name a file' if path.is_dir() else 'no such file'}")
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(f"{path}: the columns {', '.join(columns)} are read from .jsonl, .csv or .tsv files")
    rows = []
    for place, row in _table(path, _decode(path)):
        fields = tuple(_field(row, column, place, scalars=True) for column in columns)
        empty = [column for column, text in zip(columns, fields, strict=True) if not text.strip()]
        if empty:
            raise DataError(f"{place}: {empty[0]!r} is empty; mend the row or leave it out")
        rows.append(fields)
    if not rows:
        raise DataError(f"{path}: holds no row, so there is nothing to train on")
    return rows


def describe_source(path: Path | None) -> str:
    """Name the source for people.

    Args:
        path: As ``read_documents`` takes it.

    Returns:
        A name.
    """
    return "Python's own documentation (pydoc_data.topics)" if path is None else str(path)


def _python_documentation() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(f"this Python ships without pydoc_data.topics ({error}): give a text with --data") from error
    return [topics[name] for name in sorted(topics)]


def _text_files(folder: Path) -> list[Path]:
    wanted = TEXT_SUFFIXES | TABLE_SUFFIXES
    found: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(root, name) for name in names if not name.startswith(".") and Path(name).suffix.lower() in wanted
        ]
    if not found:
        raise DataError(f"{folder}: no text file in this folder (looked for {' '.join(sorted(wanted))})")
    return sorted(found)


def _read_file(path: Path, text_column: str) -> list[str]:
    text = _decode(path)
    if path.suffix.lower() in TABLE_SUFFIXES:
        return [_field(row, text_column, place) for place, row in _table(path, text, needed=text_column)]
    if path.suffix.lower() == ".json":
        raise DataError(f"{path}: .json is not read; write one object per line and name the file .jsonl")
    return [text]


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from error


def _table(path: Path, text: str, *, needed: str = "") -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the rows of a file with the place of each; the column that is needed must be in a header without rows."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _jsonl(path, text)
    return _csv(path, text, needed, delimiter="," if suffix == ".csv" else "\t")


def _jsonl(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, object]]]:
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


def _csv(path: Path, text: str, needed: str, *, delimiter: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    limit = csv.field_size_limit(max(len(text), 131072))
    try:
        if needed:
            _require_column(reader.fieldnames or [], needed, str(path))
        for row in reader:
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a table ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _field(row: Mapping[str, object], column: str, place: str, *, scalars: bool = False) -> str:
    _require_column(row, column, place)
    value = row[column]
    if value is None:
        return ""
    if scalars and isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{place}: {column!r} holds a {type(value).__name__}, not text")
    return value


def _require_column(columns: Iterable[str], column: str, place: str) -> None:
    present = [str(name) for name in columns]
    if column not in present:
        raise DataError(
            f"{place}: no column {column!r} (found: {', '.join(present) or 'none'})"
            f"{did_you_mean(column, present)}; name it with --text-column, --label-column, --prompt-column or "
            "--answer-column"
        )


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
