"""Pages that are made from the repository: tables of what is supported, errors, the design page, the changelog."""

import ast
import inspect
import re
from pathlib import Path

from ghostclip import errors
from paper_repro.examples import NAMES
from paper_repro.examples.audited import NOT_AUDITED, NOT_IN_CI

ROOT = Path(__file__).resolve().parents[1]
# Pages that stand in the package or at the top as well: (source, page, links there and what they become here).
COPIED = (
    ("ghostclip/DESIGN.md", "inside/design.md", {"GLOSSARY.md": "glossary.md", "../docs/": "../"}),
    ("ghostclip/GLOSSARY.md", "inside/glossary.md", {}),
    ("CHANGELOG.md", "changelog.md", {"docs/": ""}),
)


def write_pages(docs: Path) -> None:
    """Write the pages.

    Args:
        docs: The folder of the docs.
    """
    from paper_repro import good_model

    for source, page, links in COPIED:
        _write(docs / page, _with_links((ROOT / source).read_text(encoding="utf-8"), links))
    errors_template = _with_links((ROOT / "ghostclip/ERRORS.md").read_text(encoding="utf-8"), {"../docs/": ""})
    _write(docs / "errors.md", errors_page(errors_template))
    template = (docs / "start" / "examples.in.md").read_text(encoding="utf-8")
    _write(docs / "start" / "examples.md", template.replace("@EXAMPLES@", examples_table()))
    template = (docs / "start" / "good-model.in.md").read_text(encoding="utf-8")
    _write(docs / "start" / "good-model.md", good_model.filled(template))


def _write(path: Path, text: str) -> None:
    # Sphinx reads again what is newer: a page that is the same stays as it is.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _with_links(text: str, links: dict[str, str]) -> str:
    def moved(match: re.Match[str]) -> str:
        target = match.group(1)
        for prefix, instead in links.items():
            if target.startswith(prefix):
                return f"]({instead}{target.removeprefix(prefix)})"
        known = target.startswith(("http", "#", "mailto"))
        return match.group(0) if known else f"](repo:{target})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def errors_page(template: str) -> str:
    """Return the page of errors: the written part of each under the class's name, with what its docstring says.

    Args:
        template: The page, one heading a class.

    Returns:
        The page with docstrings and base classes.
    """
    for name, kind in classes().items():
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__mro__[1:-1] if base.__name__ not in _PLUMBING)
        also = f" Also: {bases}." if bases else ""
        shown = f"## {name}\n\n*{inspect.getdoc(kind)}*{also}\n"
        template = template.replace(f"## {name}\n", shown)
    return template


_PLUMBING = {"Exception", "BaseException", "object"}


def examples_table() -> str:
    """Return the examples with what each trains and whether it is audited."""
    lines = ["| example | what it trains | |", "|---|---|---|"]
    for name in NAMES:
        place = f"paper_repro/examples/{name}.py"
        about = ast.get_docstring(ast.parse((ROOT / place).read_text(encoding="utf-8"))) or ""
        why_not = NOT_AUDITED.get(name)
        badge = NOT_IN_CI.get(name, "**audited in CI**") if why_not is None else f"not audited: {why_not}"
        lines.append(f"| [{name}](repo:{place}) | {about.partition(chr(10))[0]} | {badge} |")
    return "\n".join(lines)


def classes() -> dict[str, type[BaseException]]:
    """Return the error classes of the library by name."""
    found = inspect.getmembers(errors, lambda item: inspect.isclass(item) and item.__module__ == errors.__name__)
    return dict(found)
