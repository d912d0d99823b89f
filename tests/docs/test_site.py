"""The pages build without a warning, and errors have their entries."""

import re
import subprocess
import sys

import pytest

from ghostclip.errors import GhostClipError
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, shown

sys.path.insert(0, str(DOCS))
import generated

WIDTH = 88
BESIDE_THE_MENU = [path for path in PAGES if path.is_relative_to(DOCS) and path.parent.name != "tutorials"]


@pytest.mark.thorough
def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "searchindex.js").exists()
    formulas = (tmp_path / "inside" / "how-it-works.html").read_text(encoding="utf-8")
    assert "<math" in formulas
    loaded = re.compile(r"""<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//""")
    assert not [page.name for page in tmp_path.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", BESIDE_THE_MENU, ids=shown)
def test_no_line_of_code_is_cut_off(path):
    """A page shows 88 columns beside its menu."""
    lines = [line for language in ("python", "sh") for _, code in blocks(path, language) for line in code.splitlines()]
    assert not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize("name", generated.classes())
def test_every_error_has_an_entry_with_a_remedy(name):
    page = (ROOT / "ghostclip" / "ERRORS.md").read_text(encoding="utf-8")
    _, heading, entry = page.partition(f"\n## {name}\n")
    assert heading, f"ERRORS.md has no entry for {name}"
    assert len(entry.partition("\n## ")[0].strip()) > 30


@pytest.mark.parametrize("kind", [kind for kind in generated.classes().values() if issubclass(kind, GhostClipError)])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on exceptions are new in Python 3.11")
def test_an_error_ends_with_the_command_that_prints_its_entry(kind):
    with pytest.raises(kind) as caught:
        raise kind("what is wrong")
    assert caught.value.__notes__ == [f"causes and remedies: ghostclip help {kind.__name__}"]
    assert str(caught.value) == "what is wrong"
