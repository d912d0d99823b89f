"""``ghostclip audit``: exit status and sentence, files of every kind, and one line about wrong input."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from ghostclip.audit import CanaryRecorder, flip_coins
from ghostclip.audit.methods import METHODS
from tests.cli.conftest import assert_refused


@pytest.fixture
def audit(command):
    return partial(command, "audit")


@pytest.fixture
def recorded(tmp_path):
    """Scores of canaries that a training without privacy would give, in each kind of file."""

    def save(kind, *, gap=4.0, count=400):
        included = flip_coins(count, seed=1)
        recorder = CanaryRecorder(included)
        recorder.record(np.random.default_rng(2).normal(included * gap, 1.0))
        path = tmp_path / f"scores{kind}"
        recorder.save(path)
        return path

    return save


@pytest.mark.parametrize("kind", [".csv", ".json", ".npz"])
def test_every_kind_of_file_gives_the_same_finding(audit, recorded, kind):
    status, out, err = audit(recorded(kind), "--claimed-epsilon", 1)
    assert status == 3, err
    assert out.startswith("epsilon >= 3.")
    assert "the claim epsilon <= 1 is contradicted." in out
    assert "guesses right" in out.splitlines()[1]
    assert len(out.splitlines()) == 2


def test_a_claim_that_holds(audit, recorded):
    status, out, _ = audit(recorded(".csv", gap=0.0), "--claimed-epsilon", 1, "--delta", 1e-6)
    assert status == 0
    assert out.startswith("epsilon >= 0.000 at delta = 1e-06 with 95 % confidence (one-run)")
    assert "is not contradicted, which does not prove it." in out


@pytest.mark.parametrize("method", METHODS)
def test_every_method(audit, recorded, method):
    status, out, err = audit(recorded(".npz"), "--method", method, "--confidence", 0.9)
    assert status == 0, err
    assert f"90 % confidence ({method})" in out


def test_finding_as_json(audit, recorded, tmp_path):
    finding = tmp_path / "audit.json"
    words = ["--method", "gaussian", "--claimed-epsilon", 2, "--json", finding]
    status, out, _ = audit(recorded(".csv"), *words)
    values = json.loads(finding.read_text(encoding="utf-8"))
    assert status == 3
    assert values["contradicts"] is True
    assert values["sentence"] == out.splitlines()[0]
    assert values["mu"] > 2
    assert "guesses" not in values


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("", "scores.csv", "columns none; wanted 'score'"),
        ("score,coin\n1,0\n", "scores.csv", "columns score, coin; wanted 'score', and 'included' or 'member'"),
        ("score,member\n1,0\n2,maybe\n", "scores.csv", "line 3, column 'member': 'maybe' is not true or false"),
        ("score,member\n1,0\nhigh,1\n", "scores.csv", "line 3, column 'score': 'high' is not a number"),
        ("score,member\n1,0\n2\n", "scores.csv", "line 3, column 'member': None is not"),
        ("score,member\n1,0\n2,1\n", "scores.csv", "1 of 2 were included"),
        ("{", "scores.json", "not readable as .json"),
        ("3", "scores.json", "expected a list of records"),
        ("no archive", "scores.npz", "not readable as .npz"),
        ("1 2", "scores.txt", "expected a file named .csv, .json or .npz"),
        (None, "scores.csv", "no such file"),
    ],
)
def test_a_wrong_file_is_one_line(audit, tmp_path, content, name, words):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = audit(path)
    assert_refused(result, words)
    assert result.out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--delta", "0"], "--delta 0.0:"),
        (["--confidence", "95"], "--confidence 95.0"),
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--guesses", "4000"], "only 400 canaries"),
        (["--claimed-epsilon", "nan"], "--claimed-epsilon nan"),
        (["--claim", "3"], "unrecognized arguments: --claim 3"),
    ],
)
def test_a_wrong_option_is_one_line(audit, recorded, options, words):
    assert_refused(audit(recorded(".csv"), *options), words)
