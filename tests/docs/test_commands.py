"""Commands that README and docs show are understood: their options exist and their values are accepted."""

import ast
import re
import shlex
import sys

import pytest

try:
    import tomllib
except ImportError:
    tomllib = None

from ghostclip.cli import _parser
from tests.docs.pages import PAGES, ROOT, blocks, shown

LINES = [
    pytest.param(line.split("#")[0].strip(), id=f"{shown(path)}: {line.split('#')[0].strip()[:60]}")
    for path in PAGES
    for _, block in blocks(path, "sh")
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("ghostclip ", "torchrun "))
]


@pytest.mark.parametrize("line", LINES)
def test_command_is_understood(line):
    words = shlex.split(line)
    # Of a program that torchrun starts, those behind its name.
    _parser().parse_args(words[words.index("ghostclip") + 1 :])


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


def _needed(path):
    """The distributions, by their import names, that the Python of a page loads."""
    trees = [ast.parse(code) for _, code in blocks(path, "python")]
    names = {
        name
        for tree in trees
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    hosts = {"transformers": ("transformers", "accelerate"), "trl": ("trl",), "lightning": ("lightning",)}
    integrations = {host for name, own in hosts.items() if f"ghostclip.integrations.{name}" in names for host in own}
    known = {*sys.stdlib_module_names, "ghostclip", "torch", "numpy", "scipy"}
    return ({name.partition(".")[0] for name in names} | integrations) - known


def _installed(path, extras):
    """What the lines of a page that call pip bring, extras of ours opened."""
    found, waiting = set(), re.findall(r"pip install [^#\n]*", path.read_text(encoding="utf-8"))
    waiting += re.findall(r'"(\.\[[a-z,]+\])"', path.read_text(encoding="utf-8"))
    while waiting:
        for word in shlex.split(waiting.pop()):
            name, _, chosen = word.rstrip("]").partition("[")
            found.add(re.split(r"[<>=!]", name)[0])
            if name in (".", "ghostclip") and chosen:
                waiting += [" ".join(extras[extra]) for extra in chosen.split(",")]
    return found


@pytest.mark.skipif(tomllib is None, reason="tomllib is new in Python 3.11")
@pytest.mark.parametrize(
    "page", ["README.md", "docs/start/quickstart.md", "docs/start/lora.md", "docs/use/trainers.md"]
)
def test_what_a_page_imports_is_what_it_tells_to_install(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert _needed(ROOT / page) <= _installed(ROOT / page, project["optional-dependencies"])
