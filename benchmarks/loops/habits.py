"""Loaders, optimizers, wrappers and habits that loops are searched with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip.data.physical_batches import BatchMemoryManager
from tests.loops.world import BATCH, World

Batch = tuple[Tensor, Tensor]
ORDINARY = "ordinary"

# Loaders: what the loop iterates over, given the private loader, the user's own and the private optimizer.


def _one_ahead(loader: Any) -> Iterator[Any]:
    waiting = None
    for batch in loader:
        if waiting is not None:
            yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting


def _physical(loader: Any, optimizer: Any, size: int) -> Iterator[Any]:
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as physical:
        yield from physical


def _twice(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield batch
        yield batch


def _merged(loader: Any) -> Iterator[Batch]:
    batches = iter(loader)
    for one in batches:
        two = next(batches, one)
        yield torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])


def _again(loader: Any) -> Iterator[Any]:
    batches = list(loader)
    yield from batches
    yield from batches[:2]


def _accelerated(loader: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True).prepare(loader)


LOADERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    ORDINARY: lambda loader, *_: loader,
    "one batch ahead": lambda loader, *_: _one_ahead(loader),
    "copies of the tensors": lambda loader, *_: ([part.clone() for part in batch] for batch in loader),
    "dictionaries": lambda loader, *_: (tuple({"x": b[0], "y": b[1]}.values()) for b in loader),
    "a list": lambda loader, *_: list(loader),
    "a list, begun again": lambda loader, *_: _again(loader),
    "a list, reversed": lambda loader, *_: list(loader)[::-1],
    "accelerate's": lambda loader, *_: _accelerated(loader),
    "the user's own": lambda _, own, __: own,
    "the user's own, in turns": lambda loader, own, _: itertools.chain.from_iterable(zip(loader, own, strict=False)),
    "made anew from its data set": lambda loader, *_: DataLoader(loader.dataset, batch_size=BATCH, shuffle=True),
    "one batch for ever": lambda loader, *_: itertools.repeat(next(iter(loader)), 3),
    "the data set as one batch": lambda loader, *_: [tuple(loader.dataset.tensors)],
    "random rows of the data set": lambda loader, *_: (
        tuple(t[torch.randperm(len(t))[:BATCH]] for t in loader.dataset.tensors) for _ in range(3)
    ),
    "BatchMemoryManager": lambda loader, _, optimizer: _physical(loader, optimizer, 3),
    "in part": lambda loader, *_: itertools.islice(loader, 2),
    "in part, twice": lambda loader, *_: itertools.chain(itertools.islice(loader, 2), itertools.islice(loader, 2)),
    "every other batch": lambda loader, *_: itertools.islice(loader, 0, None, 2),
    "half of each batch": lambda loader, *_: ((x[: len(x) // 2], y[: len(x) // 2]) for x, y in loader),
    "at most four rows": lambda loader, *_: ((x[:4], y[:4]) for x, y in loader),
    "full batches only": lambda loader, *_: ((x, y) for x, y in loader if len(x) > BATCH),
    "unlike rows only": lambda loader, *_: ((x.unique(dim=0), y[: len(x.unique(dim=0))]) for x, y in loader),
    "rows put in order": lambda loader, *_: (
        (x[x.flatten(1)[:, 0].argsort()], y[x.flatten(1)[:, 0].argsort()]) for x, y in loader
    ),
    "each batch twice": lambda loader, *_: _twice(loader),
    "two batches as one": lambda loader, *_: _merged(loader),
}
# See `Loop.uneven` and `Loop.unseen`.
UNEVEN_LOADERS = {
    "a list, reversed": "takes batches in another order than they were drawn in",
    "every other batch": "skips every other batch",
    "full batches only": "skips batches by their size",
}
UNEVEN_SOURCES = {
    "fills up to a multiple of four": "repeats records in some batches only",
    "drops a record": "drops a record of batches that have several",
}
UNSEEN_LOADERS = {"unlike rows only": "sorts inputs, and pairs them with other records' labels, before the model"}
# Options of the loader that is made private.


def _dropping(records: list[Any]) -> Any:
    return torch.utils.data.default_collate(records[:-1] or records)


def _repeating(records: list[Any]) -> Any:
    return torch.utils.data.default_collate([*records, records[0]])


def _padding(records: list[Any]) -> Any:
    return torch.utils.data.default_collate([*records, *records[:1] * (-len(records) % 4)])


SOURCES: dict[str, dict[str, Any]] = {
    ORDINARY: {},
    "drops a record": {"collate_fn": _dropping},
    "repeats a record": {"collate_fn": _repeating},
    "fills up to a multiple of four": {"collate_fn": _padding},
    "two workers": {"num_workers": 2},
    "drop_last": {"drop_last": True},
}

# Optimizers: the one that is made private, given the parameters.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    ORDINARY: lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.0),
    "groups": lambda ps: torch.optim.AdamW([{"params": ps[:2], "lr": 0.1}, {"params": ps[2:], "weight_decay": 0.0}]),
    "foreach": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    "the last layer": lambda ps: torch.optim.SGD(ps[-2:], lr=0.1),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1),
}

# Wrappers: what is called as the model, given the private model and the bare one.
WRAPPERS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    ORDINARY: lambda private, _: private,
    "the inner module": lambda _, bare: bare,
    "compiled": lambda private, _: torch.compile(private, backend="eager"),
    "compiled in place": lambda private, _: private.compile(backend="eager") or private,
    "DataParallel": lambda private, _: nn.DataParallel(private),
    "in a Sequential": lambda private, _: nn.Sequential(private),
    "with a new head": lambda private, _: nn.Sequential(private, nn.Softplus()),
    "a copy": lambda private, _: copy.deepcopy(private),
    "functional_call": lambda private, bare: (
        lambda x: torch.func.functional_call(bare, dict(bare.named_parameters()), x)
    ),
    "sub-modules by hand": lambda _, bare: lambda x: [x := part(x) for part in bare][-1],
}

# Moments of a loop at which a habit acts.
BEFORE_FORWARD, BEFORE_STEP, AFTER_STEP = "before forward", "before step", "after step"
Habit = Callable[[World, nn.Module, Any, int], None]


def _freeze(_: World, bare: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        next(bare.parameters()).requires_grad_(False)


def _thaw(_: World, bare: nn.Module, __: Any, step: int) -> None:
    next(bare.parameters()).requires_grad_(step != 0)


def _exchange(_: World, bare: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        layer = next(part for part in bare.modules() if isinstance(part, nn.Linear))
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def _exchange_data(_: World, bare: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        p = next(bare.parameters())
        p.data = p.data.clone()


def _hook(_: World, bare: nn.Module, __: Any, step: int) -> None:
    if step == 0:
        next(bare.parameters()).register_hook(lambda gradient: gradient * 2)


def _scale(_: World, bare: nn.Module, __: Any, ___: int) -> None:
    for p in bare.parameters():
        if p.grad is not None:
            p.grad.mul_(2.0)


def _replace(_: World, bare: nn.Module, __: Any, ___: int) -> None:
    for p in bare.parameters():
        if p.grad is not None:
            p.grad = p.grad * 2.0


def _by_hand(_: World, bare: nn.Module, __: Any, ___: int) -> None:
    with torch.no_grad():
        for p in bare.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


def _load_state(_: World, __: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _step_inner(_: World, __: nn.Module, optimizer: Any, ___: int) -> None:
    optimizer.original_optimizer.step()


HABITS: dict[str, tuple[str, Habit]] = {
    ORDINARY: (AFTER_STEP, lambda *_: None),
    "norms are logged": (
        BEFORE_STEP,
        lambda _, bare, *__: [p.grad is not None and p.grad.norm() for p in bare.parameters()] and None,
    ),
    "clip_grad_norm_, infinite": (
        BEFORE_STEP,
        lambda _, bare, *__: nn.utils.clip_grad_norm_(bare.parameters(), float("inf")) and None,
    ),
    "clip_grad_norm_": (BEFORE_STEP, lambda _, bare, *__: nn.utils.clip_grad_norm_(bare.parameters(), 0.01) and None),
    "clip_grad_value_": (BEFORE_STEP, lambda _, bare, *__: nn.utils.clip_grad_value_(bare.parameters(), 0.01)),
    "p.grad is scaled in place": (BEFORE_STEP, _scale),
    "p.grad is replaced": (BEFORE_STEP, _replace),
    "an update by hand": (BEFORE_STEP, _by_hand),
    "a hook on a parameter": (BEFORE_FORWARD, _hook),
    "a parameter is frozen later": (BEFORE_FORWARD, _freeze),
    "a parameter is unfrozen later": (BEFORE_FORWARD, _thaw),
    "a parameter is exchanged": (BEFORE_FORWARD, _exchange),
    "a parameter's data are exchanged": (BEFORE_FORWARD, _exchange_data),
    "the inner optimizer steps too": (BEFORE_STEP, _step_inner),
    "the optimizer's state is loaded": (BEFORE_FORWARD, _load_state),
    "a second step": (AFTER_STEP, lambda _, __, optimizer, ___: optimizer.step()),
    "a second inner step": (AFTER_STEP, _step_inner),
    "C is raised": (BEFORE_STEP, lambda _, __, optimizer, ___: setattr(optimizer, "max_grad_norm", 9.0)),
    "an EMA": (AFTER_STEP, lambda _, bare, *__: torch.optim.swa_utils.AveragedModel(bare).update_parameters(bare)),
    "evaluation": (AFTER_STEP, lambda _, bare, *__: bare.eval().train() and None),
    "evaluation mode": (BEFORE_FORWARD, lambda _, bare, *__: bare.eval() and None),
}
