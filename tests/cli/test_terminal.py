"""Long work says what it does and for how long; short work says nothing."""

from __future__ import annotations

import io
import re

import pytest

from ghostclip import terminal
from ghostclip.accounting import get_noise_multiplier
from ghostclip.cli import main
from ghostclip.terminal import Working


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(terminal, "_FIRST", 0.0)
    monkeypatch.setattr(terminal, "_TERMINAL", 0.001)
    monkeypatch.setattr(terminal, "_LOG", 0.001)


def search():
    return get_noise_multiplier(target_epsilon=2, target_delta=1e-5, sample_rate=0.01, steps=200, accountant="rdp")


def test_long_work_shows_what_and_how_long_and_vanishes(at_once):
    stream = Terminal()
    with Working("searching", stream=stream):
        while "searching" not in stream.getvalue():
            search()
    shown = stream.getvalue()
    assert re.search(r"searching: \d+ s", shown)
    assert shown.endswith("\r\x1b[2K")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["epsilon", "--noise-multiplier", "1"], r"bounding epsilon: \d+ s"),
        (["calibrate", "--target-epsilon", "2"], r"searching: \d+ s"),
    ],
)
def test_commands_show_it(at_once, capfd, words, shown):
    assert main([*words, "--sample-rate", "0.01", "--steps", "300"]) == 0
    assert re.search(shown, capfd.readouterr().err)
