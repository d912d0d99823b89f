"""The table of compatibility: a row is a feature of a tool, whether it is exact or refused, and what shows that.

Rows are in files `rows_<tool>.py` beside this one, each with a list `ROWS` that the decorator `row` fills. The tests
assert every row; `python -m benchmarks.integrations` writes the table.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tests.integrations
from ghostclip.errors import GhostClipError

OUTCOMES = ("exact", "refused")


@dataclass(frozen=True)
class Row:
    """A feature of a tool.

    Attributes:
        tool: Library, as people write its name.
        feature: What its user does, in a few words.
        outcome: "exact", or "refused" (by an error of ours, before the first release).
        note: Of an exact row, what was compared; of a refused one, a regular expression for its message.
        drive: Does it in the folder it is given. It asserts what exact means, or lets the refusal out.
        hosts: Modules that it needs besides torch.
        slow: Whether it takes longer than a test should.
        ranks: Processes that it starts.
    """

    tool: str
    feature: str
    outcome: str
    note: str
    drive: Callable[[Path], None] = field(repr=False)
    hosts: tuple[str, ...] = ()
    slow: bool = False
    ranks: int = 1

    @property
    def name(self) -> str:
        """Short and without spaces, for a test's name; says what is missing where something is."""
        missing = self.missing
        words = re.sub(r"[^0-9A-Za-z]+", "_", f"{self.tool} {self.feature}").strip("_")
        return words + (f"__without_{'_'.join(missing)}" if missing else "")

    @property
    def missing(self) -> list[str]:
        """Modules that it needs and that are not installed."""
        return [host for host in self.hosts if find_spec(host) is None]


@dataclass(frozen=True)
class Found:
    """What became of a row.

    Attributes:
        outcome: "exact", "refused", "skipped", or "wrong".
        said: The refusal's message, what is missing, or what is wrong.
    """

    outcome: str
    said: str = ""


def row(rows: list[Row], *, tool: str, outcome: str, note: str, **options: Any) -> Callable[..., Any]:
    """Put a function into a table; the first line of its docstring is the feature.

    Args:
        rows: The table.
        tool: As in `Row`.
        outcome: As in `Row`.
        note: As in `Row`.
        options: `hosts`, `slow` and `ranks`.

    Returns:
        The decorator.
    """
    assert outcome in OUTCOMES, outcome

    def put(drive: Callable[[Path], None]) -> Callable[[Path], None]:
        feature = (drive.__doc__ or "").strip().splitlines()[0].rstrip(".")
        rows.append(Row(tool, feature, outcome, note, drive, **options))
        return drive

    return put


def all_rows() -> list[Row]:
    """Return the rows of all files, in the order of the files' names.

    Returns:
        The rows of tools whose library is not installed included.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(tests.integrations.__path__))
    files = [importlib.import_module(f"tests.integrations.{name}") for name in names if name.startswith("rows_")]
    return [made for file in files for made in file.ROWS]


def outcome_of(made: Row, folder: Path) -> Found:
    """Drive a row.

    Args:
        made: The row.
        folder: Where it may write.

    Returns:
        What became of it; "wrong" where that is not what the row says.
    """
    if made.missing:
        return Found("skipped", f"{', '.join(made.missing)} not installed")
    try:
        made.drive(folder)
    except GhostClipError as error:
        said = f"{type(error).__name__}: {error}"
        as_said = made.outcome == "refused" and re.search(made.note, str(error))
        return Found("refused" if as_said else "wrong", said)
    except AssertionError as error:
        return Found("wrong", str(error) or "an assertion of the row failed")
    return Found("exact", made.note) if made.outcome == "exact" else Found("wrong", "was not refused")
