"""Attaching changes nothing that a user can see, and detaching leaves the model as it was."""

import copy
import io
import pickle

import pytest
import torch

from ghostclip.errors import GhostClipError
from tests.cases import ALL_CASES, CORE_CASES, by_name
from tests.exactness.runs import STRATEGIES, engine, expected
from tests.reference import trainable

F64 = torch.float64
core = pytest.mark.parametrize("case", CORE_CASES, ids=lambda case: case.name)


def _attach(case, strategy, model):
    return engine(strategy, batch_first=case.batch_first)(model, expected(case.name).max_grad_norm)


def _snapshot(model):
    """Describe every module and parameter: attributes, hooks, identities, classes, and what hangs on parameters."""
    modules = {
        f"module {name!r}": (
            type(module),
            sorted(module.__dict__),
            {key: list(value) for key, value in module.__dict__.items() if "hooks" in key and value},
            {key: id(p) for key, p in module._parameters.items()},
            {key: id(child) for key, child in module._modules.items()},
        )
        for name, module in model.named_modules()
    }
    parameters = {
        f"parameter {name!r}": (
            type(p),
            p.requires_grad,
            p.is_leaf,
            sorted(p.__dict__),
            list(p._backward_hooks or ()),
            p.data_ptr(),
        )
        for name, p in model.named_parameters()
    }
    return {**modules, **parameters}


def _changes(before, after):
    """Return what differs, as {name: (before, after)}, so that a failure says what was left."""
    return {name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)}


# Each case in two strategies.
_RUNS = [
    pytest.param(case, STRATEGIES[(number + further) % 4], id=f"{case.name}-{further}")
    for number, case in enumerate(ALL_CASES)
    for further in (0, 2)
]


@pytest.mark.parametrize(("case", "strategy"), _RUNS)
def test_model_is_as_before_after_remove_and_coverage_lists_every_trainable_parameter(case, strategy):
    dtype = case.dtypes[0]
    model, batch = case.model(dtype), case.data(dtype)
    # Some models keep things on themselves in their first forward, with and without us.
    with case.numerics(dtype):
        case.losses(model, batch)
    before, keys = _snapshot(model), list(model.state_dict())
    values = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        clipper = _attach(case, strategy, model)
        with case.numerics(dtype):
            clipper.backward(case.losses(model, batch))
    except GhostClipError:
        if not case.refused:
            raise
    assert list(model.state_dict()) == keys
    _check_coverage(clipper.coverage(), model)
    clipper.remove()
    clipper.remove()
    assert not _changes(before, _snapshot(model))
    for key, value in model.state_dict().items():
        assert torch.equal(value, values[key]), f"{key} changed"


@core
def test_ordinary_training_is_back_after_remove(case, strategy):
    model, batch = case.model(F64), case.data(F64)
    clipper = _attach(case, strategy, model)
    clipper.backward(case.losses(model, batch))
    clipper.remove()
    model.zero_grad(set_to_none=True)
    case.losses(model, batch).sum().backward()
    plain = case.model(F64)
    case.losses(plain, batch).sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def _copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("name", ["linear_3d", "custom_vit", "shared_tied_head", "inplace_residual"])
def test_copies_while_attached(name, strategy):
    """Copies compute the same, and using them does not disturb the clipper of the original."""
    case = by_name(name)
    model, batch = case.model(F64), case.data(F64)
    clipper = _attach(case, strategy, model)
    clipper.backward(case.losses(model, batch))
    grads = [p.grad.clone() for p in model.parameters()]
    for copied in _copies(model).values():
        assert list(copied.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(case.losses(copied, batch), case.losses(model, batch))
        copied.zero_grad(set_to_none=True)
        case.losses(copied, batch).sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    model.zero_grad(set_to_none=True)
    clipper.backward(case.losses(model, batch))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


def _check_coverage(table, model):
    assert sorted(row.name for row in table) == sorted(trainable(model))
    lines = str(table).splitlines()
    for name in trainable(model):
        path, _, own = name.rpartition(".")
        assert any(path in line and own in line for line in lines), f"{name} is not in the printed table"
