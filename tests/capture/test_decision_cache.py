"""Operations that were met before are not decided on again: the decision is the same, and holds for other batches."""

import copy
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.capture import param_use
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.rules import registry
from tests.exactness.runs import engine
from tests.reference import per_sample_gradients, whole_norm


class _Zoo(nn.Module):
    """One layer of every kind whose rule follows from the form of its data."""

    def __init__(self):
        super().__init__()
        self.table, self.layer_norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.shared, self.rms_norm = nn.Linear(8, 8), nn.RMSNorm(8)
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(8, 8, 3, padding=1), nn.Conv2d(2, 2, 2), nn.Conv3d(1, 2, 2)
        self.turned, self.groups = nn.ConvTranspose2d(2, 2, 2), nn.GroupNorm(2, 8)
        self.instances, self.last = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, 3)

    def forward(self, ids):
        x = self.shared(self.layer_norm(self.table(ids)))
        x = self.rms_norm(self.shared(x.tanh())).transpose(1, 2)
        x = self.instances(self.groups(self.conv1(x)))
        planes = self.turned(self.conv2(x.unflatten(1, (2, 4))))
        cubes = self.conv3(x.unflatten(1, (1, 2, 4)))
        return self.last(x.transpose(1, 2)).mean(1).sum(1) + planes.flatten(1).mean(1) + cubes.flatten(1).mean(1)


_KINDS = {"embedding", "layer_norm", "rms_norm", "linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d",
          "group_norm", "instance_norm"}  # fmt: skip


def _losses(model, batch):
    return model(batch["x"]).square().flatten(1).sum(1) if batch["x"].dim() > 2 else model(batch["x"]).square()


def _check(clipper, model, batch):
    clipper.backward(_losses(model, {"x": batch}))
    plain = copy.deepcopy(model)
    per_sample = per_sample_gradients(plain, {"x": batch}, _losses, axes={})
    norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
    assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-9)
    model.zero_grad()


def test_batches_of_changing_sizes_are_exact(strategy):
    """Sizes that suggest another reading, T == B among them, come after the decisions were made."""
    model = _Zoo().double()
    clipper = engine(strategy)(model, 0.1)
    for size, positions in ((3, 6), (4, 6), (6, 6), (8, 6), (2, 8), (12, 6), (1, 6), (6, 3), (5, 5)):
        _check(clipper, model, torch.randint(11, (size, positions)))


def test_known_operations_do_not_ask_their_rule(monkeypatch):
    """From the second forward on no rule is called, whatever the number of samples."""
    model = _Zoo()
    clipper = GhostClipper(model, max_grad_norm=1.0)
    clipper.backward(model(torch.randint(11, (4, 6))))
    visits = clipper._capture.forward.visits
    asked = []
    for name in _KINDS:
        entry = registry._RULES[name]

        def rule(call, kept=entry.rule):
            asked.append(call.name)
            return kept(call)

        monkeypatch.setitem(registry._RULES, name, registry._Entry(rule, entry.arguments, by_form=True))
    clipper.backward(model(torch.randint(11, (4, 6))))
    assert set(asked) == _KINDS, "rules were exchanged: each is asked again"
    asked.clear()
    for size in (4, 7, 6):
        clipper.backward(model(torch.randint(11, (size, 6))))
    assert not asked
    assert clipper._capture.forward.visits == visits, "the calls of a layer are told apart by their number"


def _tensors_in(item, seen):
    """Yield the tensors that a function's closure, or a plain object, holds."""
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, Tensor):
        yield item
        return
    parts = []
    if isinstance(item, FunctionType):
        parts = [cell.cell_contents for cell in item.__closure__ or ()]
    elif isinstance(item, (tuple, list, set, frozenset)):
        parts = item
    elif isinstance(item, dict):
        parts = item.values()
    elif hasattr(item, "__slots__") and not isinstance(item, type):
        parts = [getattr(item, name) for name in item.__slots__]
    elif hasattr(item, "__dict__") and not isinstance(item, type):
        parts = vars(item).values()
    for part in parts:
        yield from _tensors_in(part, seen)


def test_what_is_remembered_holds_no_data():
    """A remembered decision keeps tracked parameters and sizes, and none of the batch."""
    model = _Zoo()
    clipper = GhostClipper(model, max_grad_norm=1.0)
    clipper.backward(model(torch.randint(11, (4, 6))))
    decisions = [kept for found in clipper._capture._decisions._kept.values() for kept in found]
    assert {kept.name for kept in decisions} == _KINDS
    for kept in decisions:
        own = [tracked for tracked in kept.objects if isinstance(tracked, TrackedTensor)]
        values = [tracked.origin.value for tracked in own]
        held = list(_tensors_in(kept, set()))
        assert len(held) >= len(own)
        assert all(any(tensor is one for one in own + values) for tensor in held), kept.name


def test_exchanged_parameters_are_seen(strategy):
    """Another dtype, or other storage, in the middle of training."""
    model = _Zoo()
    clipper = engine(strategy)(model, 0.1)
    for _ in range(2):
        clipper.backward(model(torch.randint(11, (4, 6))))
        model.zero_grad()
    model.double()
    _check(clipper, model, torch.randint(11, (4, 6)))
    decisions = clipper._capture._decisions._kept.values()
    own = [item for found in decisions for kept in found for item in kept.objects if isinstance(item, TrackedTensor)]
    assert {tracked.origin.value.dtype for tracked in own} == {torch.float64}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    _check(clipper, model, torch.randint(11, (5, 6)))


class _MaybeSorts(nn.Module):
    """Puts its rows into another order, once switched on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.sorts = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x):
        x = self.first(x.flip(0) if self.sorts else x)
        return self.second(x[torch.arange(len(x) - 1, -1, -1)] if self.sorts else x)


def test_rows_that_move_later_are_followed(strategy, monkeypatch):
    """Data in and outside the graph is put into another order after the layers were decided on."""
    model = _MaybeSorts().double()
    clipper = engine(strategy)(model, 0.1)
    register, count = param_use.register, param_use.count
    for forward in range(7):
        x = torch.randn(5, 4, dtype=torch.float64)
        model.sorts, seen = forward in (4, 6), []
        for name, noting in (("register", register), ("count", count)):
            monkeypatch.setattr(
                param_use,
                name,
                lambda use, *where, seen=seen, call=noting: (seen.append(use.row_map.kind), call(use, *where)),
            )
        clipper.backward(model(x).square().sum(1))
        per_sample = per_sample_gradients(copy.deepcopy(model), {"x": x}, _losses_of_rows, axes={})
        norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
        assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-9)
        assert [kind == "gathered" for kind in seen[-2:]] == [model.sorts, model.sorts]
    table = clipper._capture.sites.table
    assert sum(bool(gathered) for *_, gathered in table) == 2, (
        "rows that were selected are proved at a site of their own"
    )


def _losses_of_rows(model, batch):
    return model(batch["x"]).square().sum(1)


@pytest.mark.parametrize("size", [3, 5])
def test_constants_stay_constants(size):
    """A norm of a table without samples, beside the same norm of data."""

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.register = nn.Buffer(torch.randn(5, 4, dtype=torch.float64))

        def forward(self, x):
            return self.norm(self.first(x)) @ self.norm(self.register).mT

    model = Tables().double()
    clipper = GhostClipper(model, max_grad_norm=0.1)
    for samples in (4, size, 4, size):
        x = torch.randn(samples, 4, dtype=torch.float64)
        clipper.backward(model(x).square().sum(1))
        per_sample = per_sample_gradients(copy.deepcopy(model), {"x": x}, _losses_of_rows, axes={})
        norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
        assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-9)


class _Addmm(nn.Module):
    """As transformers' ``Conv1D`` writes it: a weight stored (I, O)."""

    def __init__(self, frozen=()):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, 4), self.weight).view(len(x), -1, 6).sum(1)


@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",)])
def test_addmm_is_decided_once(strategy, frozen):
    """Its weight is used the other way round, its rows are folded; a frozen addend is a second tensor to look at."""
    torch.manual_seed(0)
    model = _Addmm(frozen).double()
    clipper = engine(strategy)(model, 0.1)
    for size in (3, 5, 3, 4):
        x = torch.randn(size, 2, 4, dtype=torch.float64)
        clipper.backward(model(x).square().sum(1))
        model.zero_grad()
        per_sample = per_sample_gradients(copy.deepcopy(model), {"x": x}, _losses_of_rows, axes={})
        norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
        assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-9)
    kept = [kept for found in clipper._capture._decisions._kept.values() for kept in found]
    assert {one.name for one in kept} == (set() if frozen else {"addmm"})


def test_data_stands_in_one_place():
    """The same tensor in the place of another argument as well is another form."""
    model = _Addmm()
    clipper = GhostClipper(model, max_grad_norm=1.0)
    clipper.backward(model(torch.randn(3, 2, 4)).square().sum(1))
    ((kept,),) = clipper._capture._decisions._kept.values()
    bias, _, weight = kept.objects
    x = torch.randn(4, 4)
    assert kept.data_of((bias, x, weight), {}) is x
    for args in ((bias, x, x), (x, x, weight), (bias, weight, x), (bias, x), (bias, x.double(), weight)):
        assert kept.data_of(args, {}) is None
    assert kept.data_of((bias, x, weight), {"beta": 1}) is None
    assert kept.data_of((bias, x), {"mat2": weight}) is None
