"""What a stranger gets: metadata that agrees with itself, and files that say what they are."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

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
