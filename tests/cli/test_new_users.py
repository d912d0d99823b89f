"""What a new user meets: one plain line for every mistake, and files that are refused before the work."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import ghostclip
from ghostclip.errors import OutputError
from ghostclip.privacy import checkpoints
from tests.cli.conftest import TINY, assert_refused

EPSILON = ["epsilon", "--noise-multiplier", "1", "--sample-rate", "0.01", "--steps", "10"]
CALIBRATE = ["calibrate", "--target-epsilon", "2", "--sample-rate", "0.01", "--steps", "10"]


@pytest.fixture
def scores(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("score,member\n1,0\n2,1\n3,1\n0,0\n")
    return path


@pytest.mark.parametrize(
    ("name", "option", "place", "part"),
    [
        ("epsilon", "--plot", "x.docx", "the ending '.docx'; a picture ends in .png, .pdf, .svg"),
        ("calibrate", "--plot", "picture", "no ending"),
        ("epsilon", "--plot", "nowhere/x.png", "there is no folder"),
        ("epsilon", "--json", "nowhere/x.json", "there is no folder"),
        ("calibrate", "--json", "", "is a folder"),
        ("audit", "--json", "scores.csv/x", "a file, not a folder, is"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(command, scores, name, option, place, part):
    tmp_path = scores.parent
    words = {"epsilon": EPSILON, "calibrate": CALIBRATE, "audit": ["audit", scores]}[name]
    result = command(*words, option, tmp_path / place)
    assert_refused(result, option, part)
    assert result[1] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["scores.csv"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_checkpoint_on_a_full_disk_leaves_the_one_before(tmp_path):
    path = tmp_path / "state.pt"
    checkpoints.save({"number": 1}, path, {})
    before = path.read_bytes()
    (tmp_path / "state.pt.unfinished").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"state\.pt: the checkpoint could not be written \(the disk is full\)"):
        checkpoints.save({"number": torch.ones(10**5)}, path, {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def disk_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_end_can_be_gone_on_from(finetune, text_file, tmp_path, monkeypatch, record_of):
    out = tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr("ghostclip.finetune.run.save_model", disk_full)
        result = finetune("--data", text_file, "--output", out, *TINY)
    assert result.status == 1
    assert (
        f"(the disk is full); once it can be, continue with: ghostclip finetune --resume --output {out}" in result.err
    )
    assert finetune("--resume", "--output", out).status == 0
    assert record_of(out)["privacy"]["steps_spent"] == 5


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["epsilno"], "did you mean 'epsilon'?"),
        (["epsilon", "--noise-multiplir", "1"], "did you mean --noise-multiplier?"),
        (["epsilon", "--noise-multiplir=1"], "did you mean --noise-multiplier?"),
        (["finetune", "--eps", "3", "--batchsize", "4"], "did you mean --epsilon --batch-size?"),
        ([*EPSILON[:1], "--samples", "500", "--batch-size", "512"], "must be from 1 to --samples, 500"),
        (["epsilon", "--noise-multiplier", "1", "--sample-rate", "0.1"], "--steps or --epochs: needed"),
        (["finetune", "--text-colum", "body"], "did you mean --text-column?"),
        ([*EPSILON, "--accountant", "rpd"], "did you mean 'rdp'?"),
        ([*EPSILON, "--neighbours", "zeroout"], "did you mean 'zero_out'?"),
        (["audit", "x.csv", "--method", "on-run"], "did you mean 'one-run'?"),
        (["inspect", "gpt2", "--strategy", "bookeeping"], "did you mean 'bookkeeping'?"),
    ],
)
def test_what_was_probably_meant(command, words, meant):
    assert_refused(command(*words), meant)


def test_version(command):
    status, out, _ = command("--version")
    assert status == 0
    assert out.startswith(f"ghostclip {ghostclip.__version__} (torch ")


@pytest.mark.parametrize("words", [[], ["finetune"], ["inspect"], ["epsilon"], ["calibrate"], ["audit"]], ids=str)
def test_every_help_has_examples(command, words):
    status, out, _ = command(*words, "--help")
    assert status == 0
    examples = out[out.index("examples:") :]
    assert f"  ghostclip {' '.join(words)}".rstrip() in examples
