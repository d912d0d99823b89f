"""Pages of the docs and the README, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = {
    "errors.md",
    "changelog.md",
    "inside/design.md",
    "start/examples.md",
    "start/good-model.md",
    "inside/glossary.md",
}
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "ghostclip" / "ERRORS.md", *DOCS.rglob("*.md")]
    if path.relative_to(ROOT).as_posix().removeprefix("docs/") not in GENERATED and "_build" not in path.parts
)
# Run as a whole by test_tutorials.py.
TUTORIALS = [path for path in PAGES if path.parent.name == "tutorials"]
# The first line of a block that is shown and not run.
NOT_RUN = "# not run: "


def shown(path: Path) -> str:
    """The name of a page in a test's name."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(line, code) of each block in a language."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in found]
