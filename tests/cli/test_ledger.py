"""`ghostclip ledger show`: a ledger is checked, and its releases and their ε are those of the engine that made them."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip.cli import main
from tests.private_run import PrivateRun


@pytest.fixture
def trained(tmp_path):
    """A ledger of two trainings of five steps, and ε of both together."""
    path, data = tmp_path / "run.ledger", TensorDataset(torch.randn(300, 7), torch.randint(0, 3, (300,)))
    for noise, level in ((1.0, "fast"), (2.0, "secure")):
        engine = ghostclip.PrivacyEngine(ledger=path, noise_level=level)
        PrivateRun(data, model=nn.Linear(7, 3), engine=engine, batch_size=60, sigma=noise).train(5)
        engine.close()
    return path, engine.get_epsilon(1e-6)


def test_releases_by_mechanism_and_their_epsilon(trained, capsys):
    path, epsilon = trained
    assert main(["ledger", "show", str(path), "--delta", "1e-6", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"] == pytest.approx(epsilon, rel=1e-12)
    assert shown["releases"] == 10
    said = [(part["releases"], part["noise_multiplier"], part["noise_level"]) for part in shown["mechanisms"]]
    assert said == [(5, 1.0, "fast"), (5, 2.0, "secure")]
    assert main(["ledger", "show", str(path), "--delta", "1e-6"]) == 0
    text = capsys.readouterr().out
    assert "10 releases" in text
    assert "5 releases: noise multiplier 2.0, max grad norm 1.0, sample rate 0.2, sampling poisson" in text


def test_half_a_line_counts_for_nothing(trained, capsys):
    path, epsilon = trained
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["ledger", "show", str(path), "--delta", "1e-6", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["releases"], [part["releases"] for part in shown["mechanisms"]]) == (9, [5, 4])
    assert shown["epsilon"] < epsilon


def test_a_changed_line_is_named(trained, capsys):
    path, _ = trained
    path.write_text(path.read_text().replace("[2.0,0.2,1]", "[9.0,0.2,1]", 1))
    assert main(["ledger", "show", str(path)]) == 2
    assert "run.ledger, line 11: the ledger is damaged" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_no_epsilon_of_zero(tmp_path, capsys):
    assert main(["ledger", "show", str(tmp_path / "run.ledgr")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
