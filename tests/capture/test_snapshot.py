"""What may change of a model between two forwards, and is seen by the second one."""

import copy

import pytest
import torch
from torch import nn

from ghostclip.errors import SampleMixingError
from tests.exactness.runs import engine
from tests.reference import clip_and_sum, per_sample_gradients


def _model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 4)).double()
    model[2].bias.requires_grad_(False)
    return model


def _another_module(model):
    model[0] = nn.Linear(4, 4).double()


def _another_parameter(model):
    model[0].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def _a_tied_one(model):
    model[2].weight = model[0].weight


def _one_less(model):
    model[0].bias = None


def _other_memory(model):
    model[0].weight.data = torch.randn(4, 4, dtype=torch.float64)


def _another_view_of_its_memory(model):
    model[0].weight.data = model[0].weight.data.t()


def _frozen(model):
    model[0].weight.requires_grad_(False)


def _unfrozen(model):
    model[2].bias.requires_grad_()


def _exchanged_places(model):
    model[0], model[2] = model[2], model[0]


def _one_more(model):
    model[1].append(nn.Linear(4, 4).double())


def _another_table(model):
    model[0].__dict__["_parameters"] = dict(model[0]._parameters)


def _names_exchanged(model):
    first, second = model[0], model[1]
    model._modules.clear()
    model._modules.update({"1": first, "0": second, "2": nn.Identity()})


def _moved_and_replaced(model):
    model[0].weight = model[2].weight
    model[2].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def _inserted_first(model):
    model.insert(0, nn.Linear(4, 4).double())


def _weights_exchanged(model):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


CHANGES = [
    _another_module, _another_parameter, _a_tied_one, _one_less, _other_memory, _another_view_of_its_memory, _frozen,
    _unfrozen, _exchanged_places, _one_more, _another_table, _names_exchanged,
    _moved_and_replaced, _inserted_first, _weights_exchanged,
]  # fmt: skip


def _rows(model, batch):
    return model(batch["x"]).square().sum(1)


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_forwards_after_a_change_are_exact(change, strategy):
    model = _model()
    clipper = engine(strategy)(model, 0.1)
    for forward in range(4):
        if forward == 2 and change is not None:
            change(model)
        x = torch.randn(5, 4, dtype=torch.float64)
        model.zero_grad()
        clipper.backward(model(x).square().sum(1))
        per_sample = per_sample_gradients(copy.deepcopy(model), {"x": x}, _rows, axes={})
        expected = clip_and_sum(per_sample, 0.1)
        assert torch.allclose(clipper.per_sample_norms, expected.norms_B, rtol=1e-9)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, expected.clipped[name], rtol=1e-9, atol=1e-12)


def test_a_batch_norm_that_begins_to_train_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    clipper = engine("bookkeeping")(model, 0.1)
    for _ in range(2):
        clipper.backward(model(torch.randn(5, 4)).square().sum(1))
        model.zero_grad()
    model.train()
    with pytest.raises(SampleMixingError, match="BatchNorm1d"):
        model(torch.randn(5, 4))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
