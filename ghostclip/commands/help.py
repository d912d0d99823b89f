"""Explain an error of ghostclip: what causes it and what to do.

examples:
  ghostclip help SampleMixingError
      the entry of one error
  ghostclip help
      all entries
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Final

from ghostclip import errors
from ghostclip._validate import did_you_mean
from ghostclip.commands.options import Options
from ghostclip.errors import InvalidOptionError

OPTIONS: Final[Options] = {
    "error": {"metavar": "ERROR", "nargs": "?", "help": "name of an error or warning (default: all of them)"},
}
_PAGE: Final = Path(errors.__file__).with_name("ERRORS.md")


def run(given: dict[str, Any]) -> int:
    """Print the entry of an error, or the whole page, and return 0."""
    page = re.sub(r"\[([^\]]+)\]\((?:\.\./)?([^)]+)\)", r"\1 (\2)", _PAGE.read_text(encoding="utf-8"))
    entries = dict(re.findall(r"^## (\w+)\n\n(.*?)\s*(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
    name = given["error"]
    if name is None:
        print(page, end="")
        return 0
    known = {entry.lower(): entry for entry in entries}
    found = known.get(name.lower())
    if found is None:
        raise InvalidOptionError(
            f"{name}: no error of ghostclip{did_you_mean(name, entries, otherwise='.')} `ghostclip help` lists them; "
            "`ghostclip COMMAND --help` explains a command."
        )
    print(f"{found}: {inspect.getdoc(getattr(errors, found))}\n\n{entries[found]}")
    return 0
