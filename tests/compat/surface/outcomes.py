"""What becomes of a script for Opacus when `opacus` is changed to `ghostclip.compat.opacus` in it."""

from __future__ import annotations

import math
import re
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.compat.surface.scripts import PREAMBLE, SCRIPTS, WHY

# An account may be tighter here, never looser than this.
_LOOSEST = 1.01
_ROUNDING = 1e-4


class Outcome(NamedTuple):
    """What a script showed, or why it ended."""

    shown: dict[str, Any]
    problem: str
    warned: tuple[str, ...]


class Pair(NamedTuple):
    """A script's two outcomes."""

    name: str
    theirs: Outcome
    ours: Outcome

    @property
    def status(self) -> str:
        """One of "same", "differs", "runs here only", "fails here" and "fails in both"."""
        if self.ours.problem:
            return "fails in both" if self.theirs.problem else "fails here"
        if self.theirs.problem:
            return "runs here only"
        return "differs" if self.differences else "same"

    @property
    def differences(self) -> list[str]:
        """What was shown and is not the same."""
        if self.ours.problem or self.theirs.problem:
            return []
        names = [*self.theirs.shown, *(name for name in self.ours.shown if name not in self.theirs.shown)]
        return [name for name in names if not _agrees(name, self.theirs.shown.get(name), self.ours.shown.get(name))]


def run(name: str, package: str) -> Outcome:
    """Run a script with one of the packages.

    Args:
        name: One of `SCRIPTS`.
        package: "opacus" or "ghostclip.compat.opacus".

    Returns:
        What came of it.
    """
    module = types.ModuleType("a_script")
    # Models are copied by pickling, which looks their classes up by name.
    sys.modules["a_script"] = module
    code = PREAMBLE + re.sub(r"\bopacus\b", package, SCRIPTS[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(code, f"<{name}: {package}>", "exec"), vars(module))
        except Exception as problem:  # noqa: BLE001 - whatever a script ends with is its outcome
            return Outcome({}, f"{type(problem).__name__}: {problem}".partition("\n")[0], ())
        finally:
            del sys.modules["a_script"]
    said = dict.fromkeys(str(w.message).partition("\n")[0] for w in caught if issubclass(w.category, UserWarning))
    return Outcome(vars(module)["shown"], "", tuple(said))


def pairs(names: Sequence[str] = ()) -> list[Pair]:
    """Run scripts with both packages.

    Args:
        names: Which; all by default.

    Returns:
        Their outcomes.
    """
    return [Pair(name, run(name, "opacus"), run(name, "ghostclip.compat.opacus")) for name in names or SCRIPTS]


def plain(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return outcomes as plain values.

    Args:
        found: The outcomes.

    Returns:
        Ready for JSON.
    """
    return [
        {
            "script": pair.name,
            "status": pair.status,
            "theirs": pair.theirs.shown.get("epsilon"),
            "ours": pair.ours.shown.get("epsilon"),
            "remark": _remark(pair),
        }
        for pair in found
    ]


def _remark(pair: Pair) -> str:
    told = [] if pair.status == "same" else [WHY.get(pair.name, "not accounted for")]
    if pair.ours.problem:
        told.append(f"here: {pair.ours.problem}")
    if pair.theirs.problem:
        told.append(f"Opacus: {pair.theirs.problem}")
    theirs, ours = pair.theirs.shown, pair.ours.shown
    told += [f"{name}: {theirs.get(name)!r} with Opacus, {ours.get(name)!r} here" for name in pair.differences]
    return "; ".join(told).replace("|", "\\|")


def _agrees(name: str, theirs: Any, ours: Any) -> bool:
    if name == "epsilon":
        return isinstance(ours, float) and 0 < ours <= _LOOSEST * theirs
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        return len(theirs) == len(ours) and all(_agrees("", a, b) for a, b in zip(theirs, ours, strict=True))
    if isinstance(theirs, float) and isinstance(ours, (int, float)):
        return math.isclose(theirs, ours, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(theirs == ours)
