"""Whether a call that Opacus takes is a call that we take."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter
from typing import Any

from tests.compat.surface.walk import Name

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def ours(path: str) -> Any:
    """Look a dotted name up in ghostclip.

    Args:
        path: Dotted, without the package's name.

    Returns:
        What it names.

    Raises:
        AttributeError: If there is nothing of that name, or it is refused by name.
    """
    parts = path.split(".")
    for split in range(len(parts), -1, -1):
        try:
            found: Any = importlib.import_module(".".join(["ghostclip.compat.opacus", *parts[:split]]))
        except ImportError:
            continue
        try:
            return attrgetter(".".join(parts[split:]))(found) if split < len(parts) else found
        except ImportError as refused:
            raise AttributeError(str(refused)) from refused
    raise AttributeError(path)


def difference(theirs: Name) -> str | None:
    """Say how our counterpart of a name differs in form.

    Args:
        theirs: The name.

    Returns:
        "" if every way to call theirs is a way to call ours with the same defaults, what differs otherwise, and None if
        there is no counterpart.
    """
    try:
        counterpart = ours(theirs.path)
    except AttributeError:
        return None
    if theirs.kind == "class" and not inspect.isclass(counterpart):
        return "is a function that makes one: " + (_calls(theirs.value, counterpart) or "same arguments")
    if theirs.kind in ("class", "function") or inspect.isfunction(theirs.value) or inspect.ismethod(theirs.value):
        return _calls(theirs.value, counterpart)
    return ""


def _calls(theirs: Any, counterpart: Any) -> str:
    if not callable(counterpart):
        return "is not called"
    wanted, offered = _parameters(theirs), _parameters(counterpart)
    if wanted is None or offered is None:
        return ""
    told = []
    for place, (name, parameter) in enumerate(wanted.items()):
        if parameter.kind in _OPEN:
            told += _open_ended(parameter, offered)
            continue
        told += _one(name, parameter, offered, place)
    extra = [name for name, p in offered.items() if name not in wanted and p.default is p.empty and p.kind not in _OPEN]
    told += [f"also needs {name}" for name in extra]
    return "; ".join(told)


def _one(name: str, theirs: inspect.Parameter, offered: dict[str, inspect.Parameter], place: int) -> list[str]:
    mine = offered.get(name)
    if mine is None:
        if any(p.kind is p.VAR_KEYWORD for p in offered.values()):
            return []
        return [f"has no {name}"]
    told = []
    if theirs.kind in _POSITIONAL and (mine.kind not in _POSITIONAL or list(offered).index(name) != place):
        told.append(f"{name} by keyword")
    if theirs.default is not theirs.empty and not _same(theirs.default, mine.default):
        told.append(
            f"{name} is required" if mine.default is mine.empty else f"{name}={_short(mine.default)} by default"
        )
    return told


def _open_ended(theirs: inspect.Parameter, offered: dict[str, inspect.Parameter]) -> list[str]:
    return [] if any(p.kind is theirs.kind for p in offered.values()) else [f"no {theirs}: options are named"]


def _parameters(thing: Any) -> dict[str, inspect.Parameter] | None:
    try:
        found = dict(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return None
    found.pop("self", None)
    return found


def _same(theirs: Any, mine: Any) -> bool:
    if isinstance(theirs, (type(None), bool, int, float, str, tuple, list)):
        return bool(type(theirs) is type(mine) and theirs == mine) or (
            isinstance(theirs, (int, float)) and not isinstance(mine, bool) and theirs == mine
        )
    return type(theirs) is type(mine)


def _short(value: Any) -> str:
    return repr(value) if not hasattr(value, "__module__") else type(value).__name__
