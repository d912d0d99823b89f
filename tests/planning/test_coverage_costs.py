"""The plan and the price in the coverage table are those of the step itself: predicted operations against counted."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from benchmarks.flops import counter
from benchmarks.models import GPT, MLP, MnistCNN
from ghostclip.capture import param_use
from ghostclip.planning.plan import Planner
from tests.cases import by_name
from tests.cases.table import next_token_loss, probe_loss

STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")


def _gpt():
    # Long enough that the layers' plans differ: some keep per-sample gradients, some take a Gram.
    model = GPT(vocabulary=150, width=48, heads=4, layers=1, positions=30)
    return model, torch.randint(150, (3, 30)), lambda m, x: next_token_loss(m(x), x)


def _tied_gpt():
    model, ids, loss = _gpt()
    model.head.weight = model.token.weight
    return model, ids, loss


def _cnn():
    return MnistCNN(), torch.randn(5, 1, 28, 28), lambda m, x: probe_loss(m(x))


def _mlp():
    return MLP(features=40, width=56), torch.randn(7, 40), lambda m, x: probe_loss(m(x))


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def _called_twice():
    return _Twice(), torch.randn(3, 9, 24), lambda m, x: probe_loss(m(x))


def _gram_in_blocks():
    return nn.Linear(200, 180), torch.randn(2, 70, 200), lambda m, x: probe_loss(m(x))


MODELS = {
    "gram_in_blocks": _gram_in_blocks,
    "gpt": _gpt,
    "tied_gpt": _tied_gpt,
    "cnn": _cnn,
    "mlp": _mlp,
    "called_twice": _called_twice,
}


def _counted(step):
    with counter() as counted:
        step()
    return counted.get_total_flops()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_predicted_operations_are_those_counted(name, strategy):
    model, x, loss = MODELS[name]()
    base = _counted(lambda: loss(model, x).sum().backward())
    model.zero_grad(set_to_none=True)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper:
        # What a clipper finds out in its first step is paid once.
        clipper.backward(loss(model, x[:2]))
        clipper.reset()
        private = _counted(lambda: clipper.backward(loss(model, x)))
        table = clipper.coverage()
    assert table.total.base == pytest.approx(base, rel=0.01)
    assert table.total.private == pytest.approx(private, rel=0.02)
    assert table.flop_ratio == pytest.approx(private / base, rel=0.02)


def _coverage(model, losses, strategy="bookkeeping"):
    with ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper:
        clipper.backward(losses(model))
        return clipper.coverage()


def _row(table, name):
    return next(row for row in table if row.name == name)


def test_plans_follow_the_shapes(monkeypatch):
    """T >= h/2 keeps the gradient, a shorter sequence takes a Gram, one position two norms, a table its rows."""
    # What a memory budget buys on top has tests of its own.
    monkeypatch.setattr(Planner, "before", lambda *args: frozenset())
    model, ids, loss = _gpt()
    table = _coverage(model, lambda m: loss(m, ids))
    assert _row(table, "blocks.0.attention_out.weight").plan == "keep per-sample gradient"
    assert "segments" in _row(table, "token.weight").plan
    short = _coverage(model, lambda m: loss(m, ids[:, :9]))
    assert "symmetric Gram" in _row(short, "blocks.0.attention_out.weight").plan
    assert _row(short, "blocks.0.attention_out.bias").plan == "dense"
    mlp, x, loss = _mlp()
    assert "two norms" in _row(_coverage(mlp, lambda m: loss(m, x)), "0.weight").plan
    assert "instantiate" in _row(_coverage(model, lambda m: _gpt()[2](m, ids), "fast"), "head.weight").plan


def test_what_is_held_is_what_book_keeping_keeps():
    """A gradient for each sample where that is the smaller form, else the output's gradient; float32."""
    model, ids, loss = _gpt()
    table = _coverage(model, lambda m: loss(m, ids))
    samples, positions, width = 3, 30, 48
    assert _row(table, "blocks.0.attention_out.weight").cost.held == 4 * samples * width * width
    assert _row(table, "head.weight").cost.held == 4 * samples * positions * 150
    assert _row(table, "final_norm.weight").cost.held == 4 * samples * width
    assert table.memory_ratio > 1


def test_rungs_are_named():
    model = by_name("custom_vit").model(torch.float64)
    case = by_name("custom_vit")
    table = _coverage(model, lambda m: case.losses(m, case.data(torch.float64)))
    assert _row(table, "gamma").rung.startswith("elementwise")
    assert {row.rung.split(",")[0] for row in table} >= {"rule", "elementwise"}
    recurrent = nn.LSTM(5, 4, batch_first=True)
    table = _coverage(recurrent, lambda m: probe_loss(m(torch.randn(3, 6, 5))[0]))
    assert {row.rung for row in table} <= {"general", "rule"}


def test_a_derived_parameter_is_named_and_priced_once():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(12, 10))
    table = _coverage(model, lambda m: probe_loss(m(torch.randn(3, 4, 12))))
    weights = [row for row in table if "original" in row.name]
    assert all("derived" in row.rung for row in weights)
    assert sum(row.cost.base > 0 for row in weights) == 1


def test_batch_axes_are_reported():
    table = _coverage(nn.Linear(5, 2), lambda m: probe_loss(m(torch.randn(4, 3, 5))))
    assert _row(table, "weight").axes == "axis 0"


class _HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.idle = nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_parameters_that_nothing_used_show_as_such():
    model = _HalfUsed()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        assert len(clipper.coverage().unused) == 4
        clipper.backward(probe_loss(model(torch.randn(4, 3))))
        table = clipper.coverage()
    assert table.unused == ["idle.weight", "idle.bias"]
    assert _row(table, "idle.weight").cost.base == 0
    assert "not used yet" in str(table)


def test_frozen_layers_have_no_row_and_no_price():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    table = _coverage(model, lambda m: probe_loss(m(torch.randn(4, 6))))
    assert [row.name for row in table] == ["1.weight", "1.bias"]
    # Nothing below it is trained: no input gradient in ordinary training either.
    assert _row(table, "1.weight").cost.base == 2 * (2 * 4 * 8 * 3)


def test_table_is_text_and_plain_numbers():
    model, x, loss = _mlp()
    table = _coverage(model, lambda m: loss(m, x))
    assert str(table).splitlines()[-1].startswith("total")
    plain = table.as_dict()
    assert plain["total"]["count"] == sum(p.numel() for p in model.parameters())
    assert plain["parameters"][0]["name"] == "0.weight"
    assert functional.relu(torch.tensor(plain["total"]["flop_ratio"])) >= 1


@pytest.mark.parametrize("depth", [1, 3], ids=["a layer by itself", "layers that are joined"])
def test_the_report_is_of_the_largest_batch_and_costs_smaller_ones_nothing(depth, monkeypatch):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(depth)))
    reports, seen = [], []
    original = param_use.statistics_of
    monkeypatch.setattr(param_use, "statistics_of", lambda *args, **rest: (seen.append(1), original(*args, **rest))[1])
    with ghostclip.GhostClipper(model, max_grad_norm=1.0, probe=False) as clipper:
        for size in (6, 3, 5, 8):
            seen.clear()
            clipper.backward(probe_loss(model(torch.randn(size, 6))))
            assert bool(seen) is (size in (6, 8))
            reports.append([row.cost.base for row in clipper.coverage() if row.cost.base])
    assert reports[0] == reports[1] == reports[2]
    assert all(larger > smaller for smaller, larger in zip(reports[2], reports[3], strict=True))
