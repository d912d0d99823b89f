"""The bar of a run: the ε that is shown is that of the step that is shown."""

from __future__ import annotations

import re

import pytest

from ghostclip.finetune import progress


@pytest.mark.parametrize("pause", [0.0, 0.003, 60.0], ids=["each", "some", "first and last"])
def test_epsilon_is_that_of_the_step(capfd, monkeypatch, pause):
    monkeypatch.setattr(progress, "_REFRESH_LOG", pause)
    monkeypatch.setattr(progress, "_SHARE", 0.0)
    done = {"steps": 3}
    with progress.ProgressBar(steps=40, done=3, epsilon=lambda: done["steps"] / 8) as bar:
        for _ in range(37):
            done["steps"] += 1
            bar.step(1.0, 5, 2)
    shown = re.findall(r"(\d+)/40 [^\r]*?ε ([\d.]+)", capfd.readouterr().err)
    assert shown[-1] == ("40", "5.00")
    for step, epsilon in shown:
        assert float(epsilon) == pytest.approx(int(step) / 8, abs=0.006)


def test_epsilon_takes_a_twentieth_of_the_time(monkeypatch):
    clock = {"now": 0.0, "asked": 0}
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(progress, "_REFRESH_LOG", 0.0)

    def epsilon():
        clock["now"] += 1.0
        clock["asked"] += 1
        return 1.0

    with progress.ProgressBar(steps=100, done=0, epsilon=epsilon) as bar:
        for _ in range(100):
            clock["now"] += 1.0
            bar.step(None, 0, 1)
    assert clock["asked"] <= 7
