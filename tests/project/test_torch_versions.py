"""The versions of torch that the package allows are versions that its core tests passed on."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.project.source import ROOT


def _script():
    spec = importlib.util.spec_from_file_location("torch_versions", ROOT / ".ci" / "torch_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


def _results() -> dict[str, list[str]]:
    lines = SCRIPT.RESULTS.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows if row[0] != "torch"}


@pytest.mark.parametrize("path", SCRIPT.CORE)
def test_core_tests_are_where_the_command_looks_for_them(path):
    assert (ROOT / path).exists()


def test_the_oldest_version_that_is_allowed_was_tested():
    (bound,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = min(_results(), key=lambda version: [int(part) for part in version.split("+")[0].split(".")])
    assert oldest == bound or oldest.startswith(f"{bound}.")


def test_no_version_failed():
    assert {version: row[2] for version, row in _results().items() if row[2] != "0"} == {}
