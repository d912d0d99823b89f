"""A text, a model small enough for any machine, and the command run inside this process."""

from __future__ import annotations

import json
import re
import signal
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from ghostclip.cli import main

TEXT = " ".join(f"The {n}th sentence says that {n} times {n} is {n * n}." for n in range(60))
# Odd sizes on purpose; every run of it takes a second or two.
TINY_MODEL = ["--layers", "1", "--hidden-size", "18", "--heads", "3", "--context-length", "23"]
TINY_RUN = ["--steps", "5", "--batch-size", "7", "--physical-batch-size", "4", "--eval-samples", "5"]
TINY_GIVEN = [*TINY_RUN, "--device", "cpu"]
TINY = [*TINY_MODEL, *TINY_GIVEN]


class Result(NamedTuple):
    """What a run of the command left behind."""

    status: int
    out: str
    err: str


def assert_refused(result: Result, *parts: str) -> None:
    """One line about what is wrong, without a traceback."""
    assert result.status == 2, result
    (line,) = result.err.strip().splitlines()
    assert re.match(r"ghostclip( \w+)?: error: ", line)
    assert "Errno" not in line
    for part in parts:
        assert part in line


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """Runs draw none, which is a third of their time, but for tests that ask for `pictures`."""
    if "pictures" not in request.fixturenames and find_spec("transformers"):
        monkeypatch.setattr("ghostclip.finetune.job.draw", lambda path, **_: path.touch())


@pytest.fixture
def pictures() -> None:
    """Runs draw their pictures, as users have them."""


@pytest.fixture
def command(capfd):
    """Run ``ghostclip`` with the given words, and give status and output."""

    def run(*words: object) -> Result:
        capfd.readouterr()
        with warnings.catch_warnings():
            # Whatever the libraries announce is theirs; the command itself reports through its output.
            warnings.simplefilter("ignore")
            try:
                status = main([*map(str, words)])
            except SystemExit as stopped:
                status = int(stopped.code or 0)
        captured = capfd.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def finetune(command):
    """Run ``ghostclip finetune`` with the given words."""
    return partial(command, "finetune")


@pytest.fixture
def record_of():
    """Read the record that a run wrote."""

    def read(folder: Path) -> dict:
        return json.loads((folder / "private" / "run.json").read_text(encoding="utf-8"))

    return read


@pytest.fixture
def after_step(monkeypatch):
    """Do something right after a given step of the next run, as a signal or a crash would."""
    from ghostclip.finetune.training import FinetuneTrainer

    def install(number, action):
        taken = {"steps": 0}
        plain = FinetuneTrainer.finish_step

        def finish_step(self):
            taken["steps"] += 1
            if taken["steps"] == number:
                action()
            return plain(self)

        monkeypatch.setattr(FinetuneTrainer, "finish_step", finish_step)

    yield install
    monkeypatch.undo()


@pytest.fixture
def stopped(finetune, text_file, tmp_path, after_step):
    """Start a run that stops after a step, and give its folder."""

    def run(step: int) -> Path:
        after_step(step, lambda: signal.raise_signal(signal.SIGINT))
        assert finetune("--data", text_file, "--output", tmp_path / "out", *TINY).status == 130
        return tmp_path / "out"

    return run
