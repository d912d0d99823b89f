"""`ghostclip epsilon` and `ghostclip calibrate`: right numbers, assumptions in the open, one-line refusals."""

from __future__ import annotations

import json
from contextlib import nullcontext
from decimal import ROUND_CEILING, ROUND_FLOOR

import numpy as np
import pytest

from ghostclip import commands
from ghostclip.accounting import create_accountant
from tests.cli.conftest import assert_refused


def reference(*history, delta=1e-5, relation="zero_out"):
    accountant = create_accountant(relation=relation)
    accountant.history = list(history)
    return accountant.epsilon_bounds(delta)


SETTING = ("--noise-multiplier", 1, "--sample-rate", 0.01)


def test_epsilon_says_what_it_assumes(command, tmp_path):
    status, out, err = command("epsilon", *SETTING, "--steps", 1000, "--json", tmp_path / "result.json")
    assert (status, err) == (0, "")
    for words in ("epsilon <= 1.8284 at delta", "no accountant can go below", "Poisson", "zero_out", "a sample:"):
        assert words in out
    result = json.loads((tmp_path / "result.json").read_text())
    expected = reference((1.0, 0.01, 1000))
    assert result["epsilon"] == expected.upper
    assert result["epsilon_lower_bound"] == expected.lower


def test_what_is_printed_is_rounded_upwards(command):
    _, out, _ = command("epsilon", *SETTING, "--steps", 1000)
    printed = float(out.split("epsilon <= ")[1].split()[0])
    assert 0 <= printed - reference((1.0, 0.01, 1000)).upper < 1.1e-4


@pytest.mark.parametrize(
    ("value", "up", "down"),
    [(2.0, "2", "2"), (1.23451, "1.2346", "1.2345"), (987654.0, "9.8766e+05", "9.8765e+05"), (0.0, "0", "0")],
)
def test_numbers_are_rounded_to_their_own_side(value, up, down):
    assert commands._rounded(value, ROUND_CEILING) == up
    assert commands._rounded(value, ROUND_FLOOR) == down


def test_samples_epochs_and_a_delta_too_large(command):
    words = ("--samples", 1000, "--batch-size", 10, "--epochs", 10, "--delta", 1e-3)
    status, out, err = command("epsilon", "--noise-multiplier", 1, *words)
    assert status == 0
    assert "1000 steps" in out
    assert "warning: delta=0.001 is not below 1/N" in err


def test_an_epsilon_that_means_nothing_is_said(command):
    status, _, err = command("epsilon", "--noise-multiplier", 1, "--sample-rate", 1, "--steps", 1000)
    assert status == 0
    assert "warning: an epsilon above 50 means nothing" in err


def test_segments_add_up(command):
    expected = reference((1.0, 0.01, 100), (2.0, 0.02, 50)).upper
    words = ("--segment", 1, 0.01, 100, "--segment", 2, 0.02, 50)
    status, out, _ = command("epsilon", *words, "--json", "-")
    assert status == 0
    assert json.loads(out[out.index("{") :])["epsilon"] == expected


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--sample-rate", 0.01, "--steps", 500), "noise_multiplier"),
        (("--noise-multiplier", 1, "--steps", 500), "sample_rate"),
        (("--noise-multiplier", 1, "--sample-rate", 0.01), "steps"),
    ],
)
def test_calibrate_solves_for_what_is_missing(command, words, name):
    status, out, _ = command("calibrate", "--target-epsilon", 2, "--accountant", "rdp", *words, "--json", "-")
    assert status == 0
    result = json.loads(out[out.index("{") :])
    assert f"{name} = " in out
    assert 1.99 < result["epsilon"] <= 2


def test_neighbours_matter(command):
    _, out, _ = command("epsilon", *SETTING, "--steps", 100, "--neighbours", "replace_one", "--json", "-")
    found = json.loads(out[out.index("{") :])
    assert found["epsilon"] == reference((1.0, 0.01, 100), relation="replace_one").upper


def test_a_plot_shows_both_bounds_by_steps(command, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(commands, "picture", lambda path, size: nullcontext(figure))
    assert command("epsilon", *SETTING, "--steps", 100, "--plot", tmp_path / "curves.png")[0] == 0
    spent = reference((1.0, 0.01, 100))
    (axes,) = figure.axes
    drawn = {line.get_label(): line.get_xydata() for line in axes.lines}
    upper, lower = drawn["ε, upper bound"], drawn["no accountant can go below"]
    assert (lower[:, 1] <= upper[:, 1]).all()
    assert (np.diff(upper, axis=0)[:, 1] >= 0).all()
    assert (np.diff(upper, axis=0)[:, 0] > 0).all()
    (this,) = (points for label, points in drawn.items() if label.startswith("this training"))
    assert this == pytest.approx(np.array([[100, spent.upper]]), rel=1e-3)
    assert np.interp(100, *upper.T) == pytest.approx(spent.upper, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("epsilon", *SETTING, "--steps", 10, "--delta", 2), "--delta 2.0: must lie strictly"),
        (("epsilon", *SETTING, "--steps", 10, "--accountant", "nope"), "--accountant 'nope' is not available"),
        (("calibrate", *SETTING, "--target-epsilon", -1), "--target-epsilon -1.0: must be"),
        (("epsilon",), "--noise-multiplier; --sample-rate, or --samples and --batch-size; --steps or --epochs: needed"),
        (("epsilon", *SETTING), "--steps or --epochs: needed"),
        (("epsilon", *SETTING, "--steps", 0), "--steps 0"),
        (("epsilon", *SETTING, "--steps", 1, "--epochs", 1), "one of the two"),
        (("epsilon", *SETTING, "--steps", 1, "--batch-size", 3), "one of the two"),
        (
            ("epsilon", "--noise-multiplier", -1, "--sample-rate", 0.1, "--steps", 1),
            "--noise-multiplier -1: must be from 0",
        ),
        (("epsilon", "--noise-multiplier", "nan", "--sample-rate", 0.1, "--steps", 1), "--noise-multiplier nan"),
        (("epsilon", "--noise-multiplier", "1e300", "--sample-rate", 0.1, "--steps", 1), "from 0 to 1e+100"),
        (("epsilon", "--segment", 1, 0.1, 1, "--segment", -1, 0.1, 1), "segment 2: noise multiplier -1"),
        (("epsilon", "--segment", 1, 3, 1), "segment 1: sample rate 3"),
        (("epsilon", "--noise-multiplier", 1, "--sample-rate", 2, "--steps", 1), "--sample-rate 2"),
        (("epsilon", *SETTING, "--steps", 1, "--accountant", "gdp"), "refused as a guarantee"),
        (("epsilon", "--segment", 1, 0.1, 2.5), "whole number"),
        (("epsilon", "--segment", 1, 0.1, "nan"), "whole number"),
        (("epsilon", "--segment", 1, 0.1, "inf"), "whole number"),
        (("epsilon", "--segment", 1, 0.1, 2, "--sample-rate", 0.2), "--sample-rate without"),
        (("calibrate", *SETTING), "--target-epsilon: needed"),
        (("calibrate", "--target-epsilon", 1, "--steps", 5), "give two"),
        (("calibrate", "--target-epsilon", 1, *SETTING, "--steps", 5), "give two"),
    ],
)
def test_wrong_input_is_one_line(command, words, match):
    assert_refused(command(*words), match)
