"""What is said once, with both versions, where a library's version is not one of those tested."""

from __future__ import annotations

import warnings

import pytest

from ghostclip.integrations import _host


@pytest.fixture(autouse=True)
def _unwarned():
    _host.warn_if_untested.cache_clear()
    yield
    _host.warn_if_untested.cache_clear()


@pytest.mark.parametrize("installed", ["4.46.0", "4.57.3.dev0", "5.23.1", "5.23"])
def test_a_version_in_the_range_is_silent(installed, monkeypatch):
    monkeypatch.setitem(_host.TESTED, "transformers", ("4.46", "5.23"))
    monkeypatch.setattr(_host.metadata, "version", lambda _: installed)
    _host.warn_if_untested("transformers")


@pytest.mark.parametrize("installed", ["4.45.9", "3"])
def test_an_older_version_is_said_once_with_both(installed, monkeypatch):
    monkeypatch.setitem(_host.TESTED, "transformers", ("4.46", "5.23"))
    monkeypatch.setattr(_host.metadata, "version", lambda _: installed)
    with pytest.warns(UserWarning, match=f"transformers {installed} is installed; .* 4.46 to 5.23"):
        _host.warn_if_untested("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _host.warn_if_untested("transformers")


@pytest.mark.parametrize("distribution", sorted(_host.TESTED))
def test_what_is_installed_here_is_in_the_range(distribution):
    pytest.importorskip(distribution.replace("-", "_"))
    _host.warn_if_untested(distribution)
