"""Links of README and docs lead somewhere: to a page that is built, or to a file of the repository."""

import re

import pytest

from tests.docs.pages import DOCS, GENERATED, PAGES, ROOT, shown

SITE = "https://ghostclip.readthedocs.io/en/latest/"
SOURCES = ("https://github.com/ghostclip/ghostclip/blob/main/", "https://github.com/ghostclip/ghostclip/raw/main/")


def _links(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def _leads_nowhere(path, link):
    if link.startswith(SITE):
        page = link.removeprefix(SITE).partition("#")[0].removesuffix(".html") + ".md"
        return page not in GENERATED and not (DOCS / page).exists()
    for prefix in ("repo:", *SOURCES):
        if link.startswith(prefix):
            return not (ROOT / link.removeprefix(prefix)).exists()
    if link.startswith("http"):
        return False
    target = link.partition("#")[0]
    place = (path.parent / target).resolve()
    inside = place.relative_to(DOCS).as_posix() if place.is_relative_to(DOCS) else ""
    return bool(target) and inside not in GENERATED and not place.exists()


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_links_lead_somewhere(path):
    assert not [link for link in _links(path) if _leads_nowhere(path, link)]


def test_links_of_the_readme_work_on_a_package_index():
    """There, nothing lies beside it."""
    links = _links(ROOT / "README.md")
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    pages |= {page.removesuffix(".md") for page in GENERATED}
    shown = {page for page in pages - {"index"} if not page.endswith(".in")}
    missing = {page for page in shown if not re.search(rf"^{page}$", index, flags=re.MULTILINE)}
    assert not missing
