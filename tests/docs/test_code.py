"""Every block of Python in README and docs runs as pasted, in order, page by page; or its first line says why not."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import NOT_RUN, PAGES, ROOT, blocks, shown

# What a newcomer pastes first runs in the quick tests, the other pages in `make check`.
FIRST = ("README.md", "docs/start/quickstart.md")
WITH_CODE = [
    pytest.param(path, marks=() if shown(path) in FIRST else pytest.mark.thorough)
    for path in PAGES
    if blocks(path, "python")
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
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
