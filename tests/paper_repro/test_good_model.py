"""From a first ε to a good model: it runs, and its committed numbers say what the page says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

from ghostclip.accounting.calibration import bounding_accountant
from paper_repro import good_model
from paper_repro.good_model import DELTA, EPSILON, RESULTS, TRAIN, Setting, filled, markdown, noise
from tests.docs.pages import DOCS


def test_the_noise_is_what_epsilon_asks_for():
    setting = Setting("head", 1e-2, batch=920, epochs=5)
    accountant = bounding_accountant("best")
    accountant.history.append((noise(setting), setting.batch / TRAIN, 5 * TRAIN // setting.batch))
    assert 0.98 * EPSILON < accountant.get_epsilon(DELTA) <= EPSILON
    assert noise(replace(setting, public=True)) == noise(setting)


def test_the_committed_results_are_whole_and_the_page_has_their_numbers():
    report = json.loads((RESULTS / "good-model.json").read_text(encoding="utf-8"))
    assert report["command"] == "python -m paper_repro.good_model"
    assert (RESULTS / "good-model.md").read_text(encoding="utf-8") == markdown(report)
    assert (RESULTS / "good-model.png").stat().st_size > 20_000
    for row in report["ladder"]:
        assert row["epsilon"] is None or 0.97 * EPSILON < row["epsilon"] <= EPSILON
        assert len(row["scores"]["last"]) == row["seeds"] >= 2
    page = filled((DOCS / "start" / "good-model.in.md").read_text(encoding="utf-8"))
    assert not re.search(r"@[\w-]+@", page)


def test_what_the_page_claims_of_the_steps_holds():
    report = json.loads((RESULTS / "good-model.json").read_text(encoding="utf-8"))
    mean = {row["name"]: row[row["weights"]] for row in report["ladder"]}

    def beats(one, other):
        return mean[one][0] - mean[other][0] > 2 * math.hypot(mean[one][1], mean[other][1])

    # What is trained decides; nothing else by itself.
    assert beats("ordinary-bert", "first")
    assert mean["first"][0] < 0.35
    assert not beats("batch", "first")
    assert not beats("rate", "batch")
    assert beats("base", "rate")
    assert beats("features", "base")
    assert beats("features", "ordinary-bert")
    assert not beats("ordinary-head", "average")
    assert not beats("scaled", "features")
    alike = [mean[name] for name in ("average", "automatic", "adaptive")]
    assert max(one for one, _ in alike) - min(one for one, _ in alike) < 2 * math.hypot(*(error for _, error in alike))
    curves = report["curves"]
    batch = curves["public"][0]["batch"]
    same = [cell for cell in curves["rate and batch"] if cell["batch"] == batch]
    assert good_model._best(curves["public"]).lr == good_model._best(same).lr
    assert all(abs(one["last"][0] - two["last"][0]) < 0.02 for one, two in zip(curves["public"], same, strict=True))
    assert max(cell["last"][0] for cell in same) > 1.4 * min(cell["last"][0] for cell in same)
    by_clip = [cell["last"] for cell in curves["clip"]]
    assert max(by_clip)[0] - min(by_clip)[0] < 2 * max(error for _, error in by_clip)
    passes = {cell["epochs"]: round(100 * cell["last"][0]) for cell in curves["epochs"]}
    assert (passes[2], passes[20]) == (70, 72)
    first = next(row for row in report["ladder"] if row["name"] == "first")
    assert round(first["sigma"] * report["parameters"]["scratch"] ** 0.5 / first["batch"], 1) == 3.5
