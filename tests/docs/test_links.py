"""Links of README and docs lead somewhere: to a page that is built, or to a file of the repository."""

import re

import pytest

from tests.docs.pages import DOCS, GENERATED, PAGES, ROOT, shown


def _links(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def _leads_nowhere(path, link):
    if link.startswith("repo:"):
        return not (ROOT / link.removeprefix("repo:")).exists()
    if link.startswith("http"):
        return False
    target = link.partition("#")[0]
    place = (path.parent / target).resolve()
    inside = place.relative_to(DOCS).as_posix() if place.is_relative_to(DOCS) else ""
    return bool(target) and inside not in GENERATED and not place.exists()


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_links_lead_somewhere(path):
    assert not [link for link in _links(path) if _leads_nowhere(path, link)]


def test_nothing_leads_to_a_public_address_that_the_project_does_not_have():
    sources = [path for folder in ("ghostclip", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    named = re.compile(r"github\.com/ghostclip|ghostclip\.(readthedocs|github)\.io|pip install '?\"?ghostclip")
    pages = [*sources, ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "CITATION.cff"]
    assert not [shown(path) for path in pages if named.search(path.read_text(encoding="utf-8"))]


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    pages |= {page.removesuffix(".md") for page in GENERATED}
    shown = {page for page in pages - {"index"} if not page.endswith(".in")}
    missing = {page for page in shown if not re.search(rf"^{page}$", index, flags=re.MULTILINE)}
    assert not missing
