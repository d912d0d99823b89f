"""Commands that README and docs show are understood: their options exist and their values are accepted."""

import re
import shlex

import pytest

from ghostclip.cli import _parser
from tests.docs.pages import PAGES, ROOT, blocks, shown

LINES = [
    pytest.param(line.split("#")[0].strip(), id=f"{shown(path)}: {line.split('#')[0].strip()[:60]}")
    for path in PAGES
    for _, block in blocks(path, "sh")
    for line in block.splitlines()
    if line.startswith("ghostclip ")
]


@pytest.mark.parametrize("line", LINES)
def test_command_is_understood(line):
    _parser().parse_args(shlex.split(line)[1:])


def test_targets_of_make_exist():
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    used = {
        target
        for path in PAGES
        for _, block in blocks(path, "sh")
        for target in re.findall(r"^make ([a-z-]+)", block, flags=re.MULTILINE)
    }
    assert used
    assert used <= known
