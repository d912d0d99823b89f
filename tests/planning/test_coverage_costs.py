"""The plan and the price in the coverage table are those of the step itself: predicted operations against counted."""

import pytest
import torch
from torch import nn

import ghostclip
from benchmarks.flops import counter
from benchmarks.models import GPT, MLP, MnistCNN
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


def _row(table, name):
    return next(row for row in table if row.name == name)


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
