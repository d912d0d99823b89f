"""Forwards that are run to be looked at leave nothing: what a program writes down is what it writes without a clipper.

Each program notes what its forwards see in a place of its own. It runs twice, as ordinary training and with a clipper,
on the same batches; after every forward, and at the end, both must have noted the same, in the same order.
"""

from __future__ import annotations

import queue
import random
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import ghostclip

STEPS = 5
_GLOBAL: list = []
_NUMBER = 0


class _Model(nn.Module):
    total = 0
    table: ClassVar[dict] = {}

    def __init__(self, write=None):
        super().__init__()
        self.first, self.second, self.write = nn.Linear(5, 4), nn.Linear(4, 3), write

    def forward(self, x, *given, **named):
        h = self.first(x)
        if self.write is not None:
            h = self.write(self, h, *given, **named)
        return self.second(h.relu())


class _Slotted:
    __slots__ = ("latest",)

    def __init__(self):
        self.latest = None


def _seen(h):
    """Return what is noted of activations: their values, whether they are in a graph, and how many rows they have."""
    return tuple(h.shape), h.requires_grad, h.detach().double().sum().item()


def _forgets():
    global _NUMBER
    _GLOBAL.clear()
    _NUMBER, _Model.total = 0, 0
    _Model.table = {}


def _in_global_list(model, h):
    _GLOBAL.append(_seen(h))
    return h


def _in_global_number(model, h):
    global _NUMBER  # noqa: PLW0603
    _NUMBER += len(h)
    return h * (1 + 0.01 * (_NUMBER > 0))


def _in_class(model, h):
    type(model).total += 1
    type(model).table[len(type(model).table)] = _seen(h)
    return h


def _written(write, read):
    """Return a program whose model writes in its forward."""

    def make():
        _forgets()
        return _Model(write), read, lambda model, x: model(x)

    return make


def _closure():
    seen, count = [], 0

    def write(model, h):
        nonlocal count
        count += 1
        seen.append(_seen(h))
        return h

    return _Model(write), lambda model: (count, list(seen)), lambda model, x: model(x)


def _by_hook(register, box, note):
    """Return a program with a hook on a module, its inputs or its outputs."""

    def make():
        model, held = _Model(), box()
        _hook(register(model), held, note)
        return model, lambda model: _told(held), lambda model, x: model(x)

    return make


def _hook(register, box, note):
    register(lambda *args: note(box, args[-1][0] if isinstance(args[-1], tuple) else args[-1]))


def _told(held):
    if isinstance(held, dict):
        return list(held.items())
    if isinstance(held, queue.SimpleQueue):
        # Nobody looks into it: the latest entry is the user's own.
        found = [held.get() for _ in range(held.qsize())]
        for item in found:
            held.put(item)
        return found[-1:]
    return list(held) if hasattr(held, "__iter__") else vars(held) if hasattr(held, "__dict__") else held.latest


def _root_hook():
    model, held = _Model(), []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.register_forward_hook(lambda module, args, output: held.append(_seen(output)) or output * 2)
    return model, lambda model: list(held), lambda model, x: model(x)


def _object_argument():
    cache = SimpleNamespace(entries=[], size=0)

    def write(model, h, cache):
        cache.entries.append(_seen(h))
        cache.size += len(h)
        return h

    return _Model(write), lambda model: vars(cache) | {"entries": list(cache.entries)}, lambda m, x: m(x, cache)


def _list_argument():
    given = []

    def write(model, h, given):
        given.append(_seen(h))
        return h * (len(given) > 0)

    return _Model(write), lambda model: list(given), lambda model, x: model(x, given)


class _InPlace(_Model):
    def forward(self, x):
        x.mul_(0.5)
        x[x < 0] += 0.1
        return super().forward(x)


def _in_place():
    seen = []

    def call(model, x):
        output = model(x)
        seen.append(_seen(x))
        return output

    return _InPlace(), lambda model: list(seen), call


def _own_generators():
    ours, array, python = torch.Generator().manual_seed(3), np.random.default_rng(3), random.Random(3)

    def write(model, h):
        noise = torch.rand((), generator=ours) + float(array.random()) + python.random()
        return h * noise

    return _Model(write), lambda model: (ours.initial_seed(), array.random(), python.random()), lambda m, x: m(x)


def _in_attribute():
    def write(model, h):
        model.held.append(_seen(h))
        model.latest = h
        return h

    model = _Model(write)
    model.held, model.latest = [], None
    return model, lambda model: (list(model.held), model.latest is None), lambda model, x: model(x)


_ON = {
    "hook of a layer": lambda model: model.first.register_forward_hook,
    "hook before a layer": lambda model: model.second.register_forward_pre_hook,
    "hook of the model": lambda model: model.register_forward_hook,
}
_BOXES = {
    "dict": (dict, lambda held, h: held.update(h=_seen(h))),
    "list": (list, lambda held, h: held.append(_seen(h))),
    "deque": (deque, lambda held, h: held.append(_seen(h))),
    "ordered dict": (OrderedDict, lambda held, h: held.__setitem__(len(held), _seen(h))),
    "object": (SimpleNamespace, lambda held, h: setattr(held, "h", _seen(h))),
    "slots": (_Slotted, lambda held, h: setattr(held, "latest", _seen(h))),
    "opaque": (queue.SimpleQueue, lambda held, h: held.put(_seen(h))),
}
PROGRAMS = {
    "global list": _written(_in_global_list, lambda model: list(_GLOBAL)),
    "global number": _written(_in_global_number, lambda model: _NUMBER),
    "class attributes": _written(_in_class, lambda model: (_Model.total, dict(_Model.table))),
    "closure": _closure,
    "hooks that change inputs and outputs of the model": _root_hook,
    "object among the arguments": _object_argument,
    "list among the arguments": _list_argument,
    "inputs changed in place": _in_place,
    "generators of one's own": _own_generators,
    "attributes": _in_attribute,
    **{f"hook of a layer, {box}": _by_hook(_ON["hook of a layer"], *_BOXES[box]) for box in _BOXES},
    **{f"{on}, list": _by_hook(_ON[on], *_BOXES["list"]) for on in _ON},
}


def _batches(steps):
    torch.manual_seed(11)
    return [torch.randn(4 + step % 3, 5) for step in range(steps)]


def _run(make, strategy=None):
    """Return what a program noted after every forward, and the sums of the clipped gradients of every step."""
    torch.manual_seed(5)
    model, read, call = make()
    clipper = None if strategy is None else ghostclip.GhostClipper(model, max_grad_norm=0.3, strategy=strategy)
    told, sums = [], []
    for x in _batches(STEPS):
        losses = call(model, x).square().sum(1)
        told.append(read(model))
        if clipper is not None:
            clipper.backward(losses)
            sums.append([parameter.grad.clone() for parameter in model.parameters()])
            model.zero_grad()
    if clipper is not None:
        clipper.remove()
    return told, sums


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "bookkeeping") for name in PROGRAMS), *(("closure", other) for other in ("ghost", "fast", "hooks"))],
)
def test_what_a_program_notes_is_what_it_notes_without_a_clipper(name, strategy):
    told, sums = _run(PROGRAMS[name], strategy)
    assert told == _run(PROGRAMS[name])[0]
    assert all(torch.isfinite(value).all() for step in sums for value in step)


@pytest.mark.parametrize("on", ["hook of a layer", "hook of the model"])
def test_features_of_a_hook_are_the_batchs_own(on):
    """A loss made of them is a sum over samples: each moves it by the bound at most."""
    bound, (x, *_) = 0.1, _batches(1)

    def clipped_sum(samples):
        torch.manual_seed(5)
        model, box = _Model(), {}
        _ON[on](model)(lambda module, inputs, output: box.update(h=output))
        with ghostclip.GhostClipper(model, max_grad_norm=bound, loss_reduction="sum") as clipper:
            losses = model(x[samples]).square().sum(1)
            clipper.backward(losses * box["h"].detach().sum(1).sign())
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    everyone = list(range(len(x)))
    whole = clipped_sum(everyone)
    for left_out in everyone:
        moved = whole - clipped_sum([sample for sample in everyone if sample != left_out])
        assert moved.norm() <= bound * (1 + 1e-6)


def _noting(log):
    return lambda grad: log.append(tuple(grad.shape))


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("where", ["layer", "output", "loss", "module"])
def test_hooks_on_gradients_are_called_once_a_step(where, scalar):
    """Backwards that prove a loss, or which rows are whose, are not the user's."""

    def told(clipped):
        torch.manual_seed(5)
        model, log, found = _Model(), [], []
        if where == "layer":
            model.first.register_forward_hook(
                lambda module, inputs, output: output.register_hook(_noting(log)) and None
            )
        if where == "module":
            model.second.register_full_backward_hook(lambda module, inputs, outputs: log.append(len(outputs)))
        clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0) if clipped else None
        for x in _batches(STEPS):
            output = model(x)
            if where == "output":
                output.register_hook(_noting(log))
            losses = output.square().mean(1)
            if where == "loss":
                losses.register_hook(_noting(log))
            loss = losses.mean() if scalar else losses
            loss.backward(torch.ones_like(loss)) if clipper is None else clipper.backward(loss)
            found.append(list(log))
        return found

    assert told(clipped=True) == told(clipped=False)
