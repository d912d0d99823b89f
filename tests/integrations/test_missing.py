"""Integrations whose library is missing say so when they are imported, and nothing else of the package needs them."""

from __future__ import annotations

import importlib
import sys

import pytest

from ghostclip.errors import NotOfferedError

NAMED = {"ghostclip.integrations.transformers": "transformers", "ghostclip.integrations.trl": "trl"}


@pytest.mark.parametrize("module", NAMED)
def test_a_missing_library_is_named(module, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, NAMED[module], None)
    with pytest.raises(NotOfferedError, match=f"(?i){module}.*install.* {NAMED[module]}|{NAMED[module]}.*pip install"):
        importlib.import_module(module)
    monkeypatch.undo()
