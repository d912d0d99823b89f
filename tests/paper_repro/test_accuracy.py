"""Table F: equal ε for every row, choices made on other records than those reported, and what the report says."""

from __future__ import annotations

import json

import pytest

from ghostclip.accounting.calibration import bounding_accountant
from paper_repro import __main__ as program
from paper_repro.accuracy import search
from paper_repro.accuracy.__main__ import RESULTS
from paper_repro.accuracy.allocation import compared
from paper_repro.accuracy.report import markdown
from paper_repro.accuracy.search import FIRST_TUNING_SEED, _jobs
from paper_repro.accuracy.tasks import TASKS
from paper_repro.accuracy.training import READ, ROWS, mechanism_of, planned

TEXT = TASKS["text"]
RUN = search.Run(seeds=2, workers=1, folder=None, quick=True, rows=tuple(ROWS))


def test_the_table_runs_from_end_to_end(tmp_path, monkeypatch):
    noises = {"steps": 6, "rounds": 2, "epsilon": 3.0, "poisson": 1.0, "balls": 0.9}
    monkeypatch.setattr(search, "compared", lambda case: noises)
    names = ["poisson", "bisr-4", "nonprivate"]
    rows = [word for name in names for word in ("--row", name)]
    arguments = ["F", "--quick", "--task", "text", *rows, "--workers", "1", "--out", str(tmp_path)]
    assert program.main(arguments) == 0
    report = json.loads((tmp_path / "table-f-cpu-tiny.json").read_text(encoding="utf-8"))
    (task,) = report["tasks"]
    assert {cell["row"] for cell in task["cells"]} == set(names)
    for cell in task["cells"]:
        assert all(len(cell["weights"][name]["scores"]) == 2 for name in READ)
        assert len(cell["tried"]) == len(task["step_sizes"]) * len(ROWS[cell["row"]].clips)
        if cell["row"] != "nonprivate":
            assert 0.98 * cell["epsilon"] < cell["epsilon_spent"] <= cell["epsilon"]
    text = (tmp_path / "table-f-cpu-tiny.md").read_text(encoding="utf-8")
    for said in ("shows that everything runs", "BISR(4)", "nothing amplified", "T = 6, k = 2", "CIFAR-10 is left out"):
        assert said in text
    assert (tmp_path / "table-f-cpu-tiny.png").stat().st_size > 5_000


def test_step_sizes_are_chosen_on_other_seeds_and_records():
    cell = {"row": "poisson-c", "epsilon": 3.0, "sigma": 1.0}
    tuning = _jobs(TEXT, cell, RUN)
    assert len(tuning) == 3 * len(TEXT.step_sizes) * TEXT.tuning_seeds
    assert {job.part for job in tuning} == {1}
    assert min(job.seed for job in tuning) >= FIRST_TUNING_SEED
    reported = search._job(TEXT, cell, RUN, seed=1, clip=1.0, step_size=1.5)
    assert reported.part == 2
    assert reported.priced


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_without_amplification_noise_is_that_of_a_gaussian_mechanism_for_each_pass(epsilon):
    """Independent noise, of which every pass costs a full participation."""
    row = ROWS["unamplified"]
    plan, mechanism = planned(TEXT, row, epsilon), mechanism_of(row, TEXT)
    assert plan is not None
    assert mechanism.correlation(mechanism.scheme(TEXT.sizes[0], TEXT.batch_size)) is None
    account = bounding_accountant()
    for _ in range(TEXT.epochs):
        account.step(noise_multiplier=plan.noise_multiplier, sample_rate=1.0)
    assert account.get_epsilon(TEXT.delta) == pytest.approx(epsilon, rel=5e-3)


def test_balls_in_bins_need_no_more_noise_than_poisson_sampling():
    result = compared((5, 1, 2.0))
    assert 0.7 < result["balls"] / result["poisson"] < 1.0


def test_the_committed_table_is_whole():
    report = json.loads((RESULTS / "table-f-cpu.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("python -m paper_repro F")
    assert (report["size"], report["seeds"]) == ("small", 5)
    assert not report["machine"]["changed_since_commit"]
    assert {task["name"] for task in report["tasks"]} == {"digits", "text"}
    for task in report["tasks"]:
        assert {cell["row"] for cell in task["cells"]} == set(ROWS)
        assert {cell["epsilon"] for cell in task["cells"]} == {1.0, 3.0, 8.0, None}
        for cell in task["cells"]:
            assert all(len(cell["weights"][name]["scores"]) >= 5 for name in READ)
            assert cell["epsilon"] is None or cell["epsilon_spent"] <= cell["epsilon"]
    assert (RESULTS / "table-f-cpu.md").read_text(encoding="utf-8") == markdown(report)
