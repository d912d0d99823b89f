"""Finds every public name of a package: those a module defines, those a package re-exports, and members of classes.

A name that a plain module merely imports for its own use is not counted: it is at home elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Opacus's own tests ship with it; they are no part of what a script uses.
NOT_SURFACE = ("opacus.tests",)


@dataclass(frozen=True)
class Name:
    """One public name of the package.

    Attributes:
        path: Dotted, without the package's name: `optimizers.optimizer.DPOptimizer.step`.
        kind: "module", "class", "function", "member" or "value".
        value: What it names; for a module that cannot be imported here, None.
        problem: Why it could not be imported, or "".
    """

    path: str
    kind: str
    value: Any
    problem: str = ""


def public_names(package: ModuleType) -> Iterator[Name]:
    """List a package's surface.

    Args:
        package: The imported package.

    Yields:
        Its modules, their names and the public members of their classes.
    """
    root = package.__name__
    yield from _module_names(package, root)
    for found in pkgutil.walk_packages(package.__path__, root + "."):
        hidden = any(part.startswith("_") for part in found.name.split("."))
        if hidden or found.name.startswith(NOT_SURFACE):
            continue
        path = found.name.removeprefix(root + ".")
        try:
            module = importlib.import_module(found.name)
        except ImportError as error:
            yield Name(path, "module", None, str(error))
            continue
        yield Name(path, "module", module)
        yield from _module_names(module, root)


def _module_names(module: ModuleType, root: str) -> Iterator[Name]:
    prefix = module.__name__.removeprefix(root).lstrip(".")
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value) or not _belongs(value, module, root):
            continue
        path = f"{prefix}.{name}" if prefix else name
        if inspect.isclass(value):
            yield Name(path, "class", value)
            if value.__module__ == module.__name__:
                yield from _members(value, path)
        else:
            yield Name(path, "function" if inspect.isfunction(value) else "value", value)


def _belongs(value: Any, module: ModuleType, root: str) -> bool:
    home = getattr(value, "__module__", None)
    if home is None or not str(home).startswith(root):
        # A constant has no home; what numpy or typing calls a value has one that is not the package's.
        return home is None and not callable(value) and type(value).__module__ == "builtins"
    return home == module.__name__ or hasattr(module, "__path__")


def _members(kind: type, path: str) -> Iterator[Name]:
    for name, value in sorted(vars(kind).items()):
        if not name.startswith("_"):
            yield Name(f"{path}.{name}", "member", getattr(kind, name) if callable(value) else value)
