"""The source tree as the project's tests see it: files, module names, imports and definitions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ghostclip"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the named folders of the repository, in a fixed order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def shown(path: Path) -> str:
    """The path as an error message names it."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """`ghostclip/factors/outer.py` is `ghostclip.factors.outer`; a package's `__init__.py` is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of the file, also inside functions and under TYPE_CHECKING, as (line, dotted name).

    `from a import b` gives `a.b`: whether b is a module or a name in one is for the caller to resolve.
    """
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def functions(path: Path) -> Iterator[tuple[tuple[ast.ClassDef, ...], FunctionNode]]:
    """Every function that is not local to another, with the classes it lies in, outermost first."""

    def below(
        body: list[ast.stmt], owners: tuple[ast.ClassDef, ...]
    ) -> Iterator[tuple[tuple[ast.ClassDef, ...], FunctionNode]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from below(node.body, (*owners, node))
            elif isinstance(node, FunctionNode):
                yield owners, node
            elif isinstance(node, ast.If):
                yield from below([*node.body, *node.orelse], owners)

    yield from below(tree_of(path).body, ())


def _said(check: Callable[[Path], None], path: Path) -> str:
    """What a check says of a file; nothing where it passes."""
    try:
        check(path)
    except AssertionError as error:
        return f"{shown(path)}: {error}"
    return ""


def of_every(files: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a check of one file; it names every file that does not pass.

    Args:
        files: Whose test it is.
    """

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            assert files
            found = [said for path in files if (said := _said(check, path))]
            assert not found, "\n".join(found)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
