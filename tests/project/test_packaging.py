"""What a stranger gets: metadata that agrees with itself, and files that say what they are."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _project_version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^version = "([^"]+)"$', text, flags=re.MULTILINE)
    assert match, "pyproject.toml states no version"
    return match.group(1)


def test_version_is_the_same_in_every_file():
    version = _project_version()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_package_says_that_it_is_typed():
    assert (ROOT / "ghostclip" / "py.typed").exists()


def test_license_is_the_full_text():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_command_points_at_something():
    try:
        distribution = importlib.metadata.distribution("ghostclip")
    except importlib.metadata.PackageNotFoundError:
        return  # run from a checkout that was not installed
    names = {point.name: point.value for point in distribution.entry_points}
    assert names.get("ghostclip") == "ghostclip.cli:main"


def test_metadata_of_a_release():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"' in text
    assert (ROOT / ".ci" / "packages.py").exists()
    assert re.search(r"^make .*\bpackage$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.slow
def test_packages_are_built_installed_and_tried(tmp_path):
    command = [sys.executable, ".ci/packages.py", "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("ghostclip-*"))) == 2
    assert "epsilon <= " in done.stdout
