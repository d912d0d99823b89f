"""The output folder and the picture: atomic, never overwritten by accident."""

from __future__ import annotations

import pytest

from ghostclip.errors import ResumeError
from ghostclip.finetune import run


def test_default_folder_is_the_first_free_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.choose_folder(None, resume=False).name == "ghostclip-run"
    (tmp_path / "ghostclip-run").mkdir()
    (tmp_path / "ghostclip-run" / "run.json").write_text("{}")
    assert run.choose_folder(None, resume=False).name == "ghostclip-run-2"
    with pytest.raises(ResumeError, match="no interrupted run"):
        run.choose_folder(None, resume=True)
    (tmp_path / "ghostclip-run-2" / "private" / "resume").mkdir(parents=True)
    (tmp_path / "ghostclip-run-2" / "private" / "resume" / "state.pt").write_text("")
    assert run.choose_folder(None, resume=True).name == "ghostclip-run-2"
