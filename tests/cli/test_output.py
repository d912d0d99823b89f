"""The output folder and the picture: atomic, never overwritten by accident."""

from __future__ import annotations

import pytest

from ghostclip.errors import OutputError, ResumeError
from ghostclip.finetune import run
from ghostclip.finetune.record import draw


def test_empty_and_missing_folders_are_usable(tmp_path):
    run.require_usable(tmp_path, overwrite=False)
    run.require_usable(tmp_path / "new" / "er", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use_is_refused_unless_asked(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty; name another folder; --overwrite"):
        run.require_usable(tmp_path, overwrite=False)
    run.require_usable(tmp_path, overwrite=True)
    run.start_anew(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


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


@pytest.mark.parametrize("losses", [[], [None], [5.0], [5.0, None, 4.0] * 20])
def test_picture_is_a_png_whatever_the_losses(tmp_path, losses):
    epsilons = [(0, 0.0), (len(losses), 2.5)]
    draw(tmp_path / "plot.png", losses=losses, epsilons=epsilons, held_out=(5.5, 4.0), budget=(3.0, 1e-5))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")
