"""What the benchmarks stand on: the model's cost, and a README whose figures come from a committed run."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import readme
from benchmarks.correctness import relative_error
from benchmarks.engines import NON_PRIVATE, STRATEGIES
from benchmarks.flops import count, counter
from benchmarks.report import markdown
from benchmarks.tasks import PerSampleCrossEntropy, per_sample_losses, tasks

CPU = torch.device("cpu")
NAMES = [task.name for task in tasks(quick=False)]


def _task(name: str, *, quick: bool):
    return next(task for task in tasks(quick=quick) if task.name == name)


def test_gpt_costs_what_it_is_said_to_cost():
    task = _task("gpt", quick=False)
    runner = NON_PRIVATE.attach(task.model(CPU), 1.0)
    assert round(count(runner, task.batch(CPU)) / 1e9, 2) == 54.38


def test_cnn_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in _task("cnn", quick=False).model(CPU).parameters()) == 26_010


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_the_loss_agree(name):
    task = _task(name, quick=True)
    model, (inputs, target) = task.model(CPU), task.batch(CPU)
    criterion = PerSampleCrossEntropy()
    losses_B = per_sample_losses(model, (inputs, target))
    assert losses_B.shape == (task.batch_size,)
    torch.testing.assert_close(criterion(model(inputs), target), losses_B.mean())


def test_relative_error_sees_one_wrong_parameter():
    want = [torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)]
    assert relative_error([want[0].clone(), want[1].clone()], want) == 0.0
    assert relative_error([want[0].clone(), want[1] * 1.5], want) == pytest.approx(0.5)
    assert relative_error([want[0].clone(), None], want) == pytest.approx(1.0)
    assert relative_error([want[0] * float("nan"), want[1].clone()], want) == float("inf")


def test_every_strategy_is_compared():
    from benchmarks.engines import engines

    names = {engine.name for engine in engines()}
    assert names >= {"nonprivate", *STRATEGIES}


def test_a_wrong_engine_shows_no_time():
    machine = {"cpu": "a", "cores": 1, "threads": 1, "memory_gib": 1, "os": "b", "python": "3", "versions": {}}
    machine |= {"commit": "c" * 40, "changed_since_commit": False}
    row = {"name": "x", "title": "X", "private": True, "status": "wrong", "error": 0.25, "wall_seconds": 0.123}
    task = {"title": "T", "parameters": 1, "max_grad_norm": 1.0, "rounds": 1, "engines": [row]}
    text = markdown({"command": "c", "date": "d", "quick": False, "machine": machine, "tasks": [task]})
    assert "wrong: error 2e-01" in text
    assert "123" not in text


@pytest.mark.parametrize("page", readme.PAGES)
def test_pages_show_the_committed_results(page):
    text = (readme.ROOT / page).read_text(encoding="utf-8")
    assert readme.rewritten(page, text) == text, "run `python -m benchmarks.readme`"


def test_committed_results_are_whole():
    for path in readme.RESULTS.glob("report-*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        assert not report["quick"], f"{path.name}: a quick run says nothing about speed"
        assert report["machine"]["commit"], f"{path.name} names no commit"
        assert {"gpt"} <= {task["name"] for task in report["tasks"]} <= set(NAMES)
        ours = [row for task in report["tasks"] for row in task["engines"] if row["name"] in STRATEGIES]
        assert ours
        assert all(row["status"] == "ok" for row in ours)


def test_models_are_plain_torch():
    for task in tasks(quick=True):
        modules = list(task.model(CPU).modules())[1:]
        leaves = [module for module in modules if not list(module.children())]
        assert all(type(leaf).__module__.startswith(nn.__name__) for leaf in leaves)


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a.mm(b),
        lambda a, b: torch.zeros(3, 7).addmm_(a, b),
        lambda a, b: torch.zeros(1, 3, 7).baddbmm_(a[None], b[None], alpha=2.0),
        lambda a, b: torch.addbmm(torch.zeros(3, 7), a[None], b[None]),
        lambda a, b: torch.zeros(3, 7).addbmm_(a[None], b[None]),
        lambda a, b: [a.mv(column) for column in b.t()],
        lambda a, b: [torch.zeros(3).addmv_(a, column) for column in b.t()],
        lambda a, b: [torch.zeros(3, 7).addr_(a[:, i], b[i]) for i in range(5)],
        lambda a, b: [row.dot(column) for row in a for column in b.t()],
        lambda a, b: torch.einsum("ik,kj->ij", a, b),
    ],
)
def test_a_product_costs_the_same_however_it_is_written(product):
    with counter() as counted:
        product(torch.ones(3, 5), torch.ones(5, 7))
    assert counted.get_total_flops() == 2 * 3 * 5 * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_dtype_of_their_own_are_counted(dtype):
    left, right = torch.empty(3, 4, 5, device="meta", dtype=dtype), torch.empty(3, 5, 6, device="meta", dtype=dtype)
    with counter() as counted:
        torch.bmm(left, right, out_dtype=dtype)
        torch.bmm(left, right)
        torch.mm(left[0], right[0])
    assert counted.get_total_flops() == 2 * 4 * 5 * 6 * (3 + 3 + 1)
