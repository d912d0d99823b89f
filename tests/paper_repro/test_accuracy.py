"""Table F: equal ε for every row, choices made on other records than those reported, and what the report says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ghostclip.accounting.registry import bounding_accountant
from paper_repro import __main__ as program
from paper_repro.accuracy import search, tasks
from paper_repro.accuracy.__main__ import RESULTS
from paper_repro.accuracy.allocation import compared
from paper_repro.accuracy.report import difference, markdown
from paper_repro.accuracy.search import FIRST_TUNING_SEED, _chosen, _jobs, _means
from paper_repro.accuracy.tasks import TASKS, found
from paper_repro.accuracy.training import READ, ROWS, Job, mechanism_of, planned, trained
from paper_repro.data import DataError

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


def test_parts_are_disjoint_and_the_same_in_every_run():
    first, again = (TEXT.parts(None) for _ in range(2))
    assert all(torch.equal(one[0], two[0]) for one, two in zip(first, again, strict=True))
    assert [len(targets) for _, targets in first] == list(TEXT.sizes)
    numbered = replace(TEXT, load=lambda _: (torch.arange(40_000), torch.arange(40_000)), sizes=(20_000, 4000, None))
    parts = [set(inputs.tolist()) for inputs, _ in numbered.parts(None)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40_000


def test_step_sizes_are_chosen_on_other_seeds_and_records():
    cell = {"row": "poisson-c", "epsilon": 3.0, "sigma": 1.0}
    tuning = _jobs(TEXT, cell, RUN)
    assert len(tuning) == 3 * len(TEXT.step_sizes) * TEXT.tuning_seeds
    assert {job.part for job in tuning} == {1}
    assert min(job.seed for job in tuning) >= FIRST_TUNING_SEED
    reported = search._job(TEXT, cell, RUN, seed=1, clip=1.0, step_size=1.5)
    assert reported.part == 2
    assert reported.priced


def test_each_kind_of_weights_has_the_best_of_what_was_tried():
    jobs = [
        Job("text", "poisson", 3.0, 1.0, step, 1.0, seed=FIRST_TUNING_SEED + number, part=1)
        for step in (0.1, 0.5, 2.0)
        for number in range(2)
    ]
    scores = [
        {"last": a, "exponential": b, "tail": 0.5} for a, b in [(1, 0), (0, 0), (0.6, 0.1), (0.6, 0.5), (0, 1), (0, 1)]
    ]
    chosen = _chosen(_means(jobs, scores))
    assert (chosen["last"]["step_size"], chosen["last"]["at_edge"]) == (0.5, False)
    assert (chosen["exponential"]["step_size"], chosen["exponential"]["at_edge"]) == (2.0, True)


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


def test_every_task_has_a_delta_that_its_records_allow():
    assert all(task.delta <= 0.1 / task.sizes[0] * 1.001 for task in TASKS.values())


def test_balls_in_bins_need_no_more_noise_than_poisson_sampling():
    result = compared((5, 1, 2.0))
    assert 0.7 < result["balls"] / result["poisson"] < 1.0


def test_a_difference_has_the_error_of_both():
    one, other = {"mean": 0.5, "standard_error": 0.03}, {"mean": 0.4, "standard_error": 0.04}
    assert difference(one, other) == pytest.approx((0.1, 0.05))


def test_digits_are_read_and_learnt():
    pytest.importorskip("sklearn")
    task, parts = found("digits", None, False)
    assert [tuple(inputs.shape) for inputs, _ in parts] == [(1200, 64), (237, 64), (360, 64)]
    plan = planned(task, ROWS["poisson"], 8.0)
    assert trained(Job("digits", "poisson", 8.0, plan.noise_multiplier, 1.5, 1.0, seed=1, part=2))["last"] > 0.8


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        tasks.digits(None)


def test_cifar_of_the_user_is_a_task_of_the_table(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes((bytes([4]) + bytes(range(256)) * 12) * 60)
    task = replace(TASKS["cifar10"], sizes=(30, 20, None), batch_size=10, epochs=1)
    parts = task.parts(tmp_path)
    assert [tuple(inputs.shape) for inputs, _ in parts] == [(30, 3, 32, 32), (20, 3, 32, 32), (10, 3, 32, 32)]
    with pytest.raises(DataError, match="60 records are fewer"):
        TASKS["cifar10"].parts(tmp_path)
    with pytest.raises(DataError, match="name their folder with --data"):
        TASKS["cifar10"].parts(None)


def test_a_table_of_cifar_of_the_user_runs_from_end_to_end(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    draws = torch.randint(256, (80, 3072), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    records = b"".join(bytes([number % 10]) + bytes(row.tolist()) for number, row in enumerate(draws))
    for name in ("data_batch_1.bin", "data_batch_2.bin"):
        (folder / name).write_bytes(records)
    short = replace(TASKS["cifar10"], sizes=(60, 40, None), batch_size=20, epochs=1, epsilons=(9.0,), step_sizes=(0.4,))
    monkeypatch.setitem(TASKS, "cifar10", short)
    monkeypatch.setattr(tasks, "shortened", lambda task: task)
    monkeypatch.setattr("paper_repro.accuracy.__main__.QUICK_GRID", ())
    rows = [word for name in ("bandmf-2", "buffered-3", "nonprivate") for word in ("--row", name)]
    arguments = ["F", "--quick", "--task", "cifar10", *rows, "--workers", "1", "--data", str(tmp_path)]
    assert program.main([*arguments, "--seeds", "1", "--out", str(tmp_path)]) == 0
    (task,) = json.loads((tmp_path / "table-f-cpu-tiny.json").read_text(encoding="utf-8"))["tasks"]
    assert task["records"] == [60, 40, 60]
    assert task["parameters"] == 550_570
    for cell in task["cells"]:
        assert cell["row"] == "nonprivate" or 8.8 < cell["epsilon_spent"] <= 9.0
    text = (tmp_path / "table-f-cpu-tiny.md").read_text(encoding="utf-8")
    assert "CIFAR-10, CNN of 550,570 parameters" in text
    assert "CIFAR-10 is left out" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "0"], "argument --seeds: 0 is not at least 1"),
        (["--workers", "0"], "argument --workers: 0 is not at least 1"),
        (["--row", "bsr"], "argument --row: invalid choice: 'bsr'"),
        (["--tiny"], "unrecognized arguments: --tiny"),
        (["--quick", "--workers", "1", "--task", "cifar10", "--row", "poisson", "--data", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("paper_repro.accuracy.__main__.QUICK_GRID", ())
    with pytest.raises(SystemExit) as stopped:
        program.main(["F", *arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("python -m paper_repro F: error: ")
    assert said in last


def test_rows_are_added_to_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("paper_repro.accuracy.__main__.QUICK_GRID", ())
    arguments = ["F", "--quick", "--task", "digits", "--workers", "1", "--seeds", "1", "--out", str(tmp_path)]

    def table(*more):
        assert program.main([*arguments, *more]) == 0
        return json.loads((tmp_path / "table-f-cpu-tiny.json").read_text(encoding="utf-8"))

    first = table("--row", "automatic", "--row", "nonprivate")
    both = table("--row", "poisson", "--add")
    assert [cell["row"] for cell in both["tasks"][0]["cells"]] == ["poisson", "automatic", "nonprivate"]
    assert both["tasks"][0]["cells"][1:] == first["tasks"][0]["cells"]
    assert both["command"] == first["command"]
    assert both["notes"][-1].startswith("Measured later: poisson of digits, by `python -m paper_repro F --quick")
    with pytest.raises(SystemExit):
        table("--row", "poisson", "--add", "--seeds", "2")
    assert len(table("--row", "poisson")["tasks"][0]["cells"]) == 1


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
