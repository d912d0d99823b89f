"""Sums before an attempt: copied on their device, when they are first changed, and put back any number of times."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ghostclip import GhostClipper
from ghostclip.clipping.store import GradientStore
from tests.traffic import GPU, counted


def _store(device="cpu"):
    parameters = {name: nn.Parameter(torch.ones(3, 2, device=device)) for name in ("used", "unused", "new")}
    store = GradientStore(parameters)
    store.own(samples=False)
    for name in ("used", "unused"):
        _add(store, name)
    store.finish()
    return store, parameters


def _add(store, name):
    buffer, is_new = store.buffer(name)
    if is_new:
        buffer.zero_()
    buffer.add_(1.0)


def _sums(store, parameters):
    return {name: store.summed_gradient(p).flatten()[0].item() for name, p in parameters.items() if p in store._sums}


def test_what_changed_is_put_back_again_and_again():
    store, parameters = _store()
    restore, forget = store.snapshot()
    untouched = store._sums[parameters["unused"]]
    for _ in range(3):
        for _ in range(2):
            _add(store, "used")
            _add(store, "new")
            store.finish()
        assert _sums(store, parameters) == {"used": 3.0, "unused": 1.0, "new": 2.0}
        restore()
        assert _sums(store, parameters) == {"used": 1.0, "unused": 1.0}
        assert store._sums[parameters["unused"]] is untouched
        assert store.has_sum
    # In the middle of a backward as well, and after sums were dropped.
    _add(store, "used")
    store.reset()
    restore()
    assert _sums(store, parameters) == {"used": 1.0, "unused": 1.0}
    forget()
    _add(store, "used")
    store.finish()
    assert _sums(store, parameters) == {"used": 2.0, "unused": 1.0}
    assert not store._kept


def test_sums_that_are_dropped_for_a_doubt_come_back():
    store, parameters = _store()
    restore, _ = store.snapshot()
    store.drop_if(torch.tensor(True))
    assert _sums(store, parameters) == {"used": 0.0, "unused": 0.0}
    restore()
    assert _sums(store, parameters) == {"used": 1.0, "unused": 1.0}


def test_sums_that_were_formed_together_are_dropped_together():
    """One operation for all of them, whatever else lies in other tensors."""
    layers = nn.ModuleList(nn.LayerNorm(3) for _ in range(4))
    parameters = dict(layers.named_parameters())
    store = GradientStore(parameters)
    store.own(samples=False)
    names = list(parameters)
    store.add_several(names[:5], torch.ones(5, 3))
    store.add(names[5], torch.ones(3))
    filled = []
    with _Filled(filled):
        store.drop_if(torch.tensor(True))
    assert sorted(filled) == [3, 15]
    assert all(not store.summed_gradient(parameters[name]).any() for name in names[:6])


class _Filled(TorchDispatchMode):
    """Notes how many elements are filled."""

    def __init__(self, found: list[int]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "masked_fill_":
            self._found.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_two_at_once():
    store, parameters = _store()
    outer, forget_outer = store.snapshot()
    _add(store, "used")
    store.finish()
    inner, forget_inner = store.snapshot()
    _add(store, "used")
    store.finish()
    inner()
    assert _sums(store, parameters)["used"] == 2.0
    forget_inner()
    outer()
    assert _sums(store, parameters)["used"] == 1.0
    forget_outer()


def test_what_was_released_is_not_put_back():
    """The accumulators become the release: they hold noise, and were accounted for."""
    store, parameters = _store()
    restore, _ = store.snapshot()
    store.hand_over(list(parameters.values()))
    restore()
    assert not store._sums
    assert not store.has_sum


def test_nothing_is_copied_before_it_changes_and_nothing_to_the_host():
    """Before, all sums were copied to the host's memory before each physical batch, pageable."""
    with counted() as traffic:
        store, parameters = _store(GPU)
        launches = traffic.launches
        restore, _ = store.snapshot()
        assert traffic.launches == launches
        before = traffic.bytes
        store.buffer("used")
        assert traffic.bytes - before == 2 * 4 * parameters["used"].numel()
        restore()
        assert traffic.launches == launches + 1
    assert not traffic.reads


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "hooks"])
def test_a_backward_is_undone_to_the_bit(strategy):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
    clipper = GhostClipper(model, max_grad_norm=0.7, strategy=strategy)
    clipper.own_gradients(discard=lambda: None, samples=False)
    x = torch.randint(9, (6, 3))

    def backward(rows):
        clipper.backward(nn.functional.cross_entropy(model(x[rows]), x[rows, 0] % 2, reduction="none"))

    def same():
        return [torch.equal(one, clipper.summed_gradient(p)) for one, p in zip(sums, model.parameters(), strict=True)]

    backward(slice(0, 3))
    sums = [clipper.summed_gradient(p) for p in model.parameters()]
    with clipper.savepoint() as savepoint:
        backward(slice(3, 6))
        assert not any(same())
        savepoint.restore()
        assert all(same())
        backward(slice(3, 6))
    assert not any(same())
    assert not clipper._store._kept
