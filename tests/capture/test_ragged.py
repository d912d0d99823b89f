"""Nested tensors among a model's inputs: exact where the model pads them, refused where a parameter meets one."""

import copy

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Padding(nn.Module):
    """The mean over each row's own entries."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids):
        lengths = ids.offsets().diff()
        padded = ids.to_padded_tensor(0)
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).unsqueeze(2)
        return self.last((self.table(padded) * mask).sum(1) / lengths[:, None])


class Ragged(Padding):
    """A layer on ragged rows."""

    def forward(self, ids):
        return self.last(self.table(ids)).to_padded_tensor(0).sum(1)


class Product(Padding):
    """A product with ragged rows."""

    def forward(self, ids):
        rows = torch.nested.nested_tensor([torch.ones(len(row), 4) for row in ids.unbind()], layout=torch.jagged)
        return (rows @ self.table.weight.T).to_padded_tensor(0).sum(1)


def _ids(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def _rows():
    torch.manual_seed(0)
    return [torch.randint(20, (3 + sample % 4,)) for sample in range(7)]


def test_rows_that_the_model_pads_are_clipped_one_by_one(strategy):
    rows, model, bound = _rows(), Padding().double(), 0.3
    plain = copy.deepcopy(model)
    wanted = 0
    for row in rows:
        loss = plain(_ids([row])).square().sum()
        grad = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(plain.parameters()))])
        wanted = wanted + grad * (bound / grad.norm()).clamp(max=1)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=bound, strategy=strategy)
    clipper.backward(model(_ids(rows)).square().sum(1))
    got = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("build", "named"), [(Ragged, "embedding"), (Product, "matmul")])
def test_a_parameter_that_meets_ragged_rows_is_refused(build, named, strategy):
    model = build()
    with (
        ghostclip.GhostClipper(model, max_grad_norm=0.3, strategy=strategy),
        pytest.raises(UnsupportedModelError, match=rf"nested tensor in {named}.*to_padded_tensor"),
    ):
        model(_ids(_rows()))
