"""Every block of Python in README and docs runs as pasted, in order, page by page; or its first line says why not."""

import multiprocessing
import os
import runpy
import sys
import warnings

import pytest

from tests.docs.pages import NOT_RUN, PAGES, TUTORIALS, blocks, shown

# What a newcomer pastes first runs in the quick tests, the other pages in `make check`.
FIRST = ("README.md", "docs/start/quickstart.md")
WITH_CODE = [
    pytest.param(path, marks=() if shown(path) in FIRST else pytest.mark.thorough)
    for path in PAGES
    if blocks(path, "python") and path not in TUTORIALS
]


@pytest.mark.parametrize("path", WITH_CODE, ids=shown)
def test_code_runs_as_pasted(path, tmp_path):
    """In a fresh process and an empty folder, as a reader pastes it; each block after those before it."""
    lines: list[str] = []
    for line, code in blocks(path, "python"):
        if code.startswith(NOT_RUN):
            reason = code.removeprefix(NOT_RUN).partition("\n")[0]
            assert len(reason) > 8, f"{shown(path)}:{line}: say why the block does not run"
            compile(code, f"{shown(path)}:{line}", "exec")
            continue
        # The lines of the page, so that an error names them.
        lines += [""] * (line - 1 - len(lines)) + code.splitlines()
    script, said = tmp_path / "page.py", tmp_path / "said.txt"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    reader = multiprocessing.get_context("forkserver").Process(target=_paste, args=(script, said))
    reader.start()
    reader.join(300)
    if reader.is_alive():
        reader.kill()
        reader.join()
    assert reader.exitcode == 0, said.read_text(encoding="utf-8")[-3000:]


def _paste(script, said):
    """Run a page as the program of this process, which has torch loaded and nothing else done."""
    with said.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    warnings.simplefilter("ignore")
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
