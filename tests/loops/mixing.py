"""Loops of models that look at the batch without a gradient path, and of one that only routes its rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.loops.loop import Loop
from tests.loops.models import dropping, functional, mlp
from tests.loops.rows import row
from tests.loops.world import CLASSES, FEATURES, VOCABULARY, World

LOOPS: list[Loop] = []


def _statistics(world: World, model: nn.Module) -> None:
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


class _Branches(nn.Module):
    """Scales its outputs by what the batch is like, without a gradient path."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = dropping() if kind.startswith("dropout") else mlp()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x)
        if self.kind == "branch":
            return scores * 3 if len(x) % 2 else scores
        if self.kind == "raising":
            if len(x) not in (0, 1) and len(x) == x.shape[0] and not torch.is_grad_enabled():
                raise RuntimeError("this model only runs in training")
            return scores * (4.0 / max(1, len(x)))
        return scores * (4.0 / max(1, len(x)))


@row(LOOPS, expect="refused")
def _branch_on_the_batch(world: World) -> None:
    """The model branches on the number of records."""
    _statistics(world, world.watch(lambda: _Branches("branch")))


@row(LOOPS, expect="refused")
def _division_by_the_batch_size(world: World) -> None:
    """The model divides by len(x)."""
    _statistics(world, world.watch(lambda: _Branches("size")))


@row(LOOPS, expect="refused")
def _division_by_the_batch_size_with_dropout(world: World) -> None:
    """The model divides by len(x), and has dropout."""
    _statistics(world, world.watch(lambda: _Branches("dropout")))


@row(LOOPS, expect="refused")
def _a_check_that_raises(world: World) -> None:
    """The model divides by len(x), and raises where no gradient is recorded."""
    _statistics(world, world.watch(lambda: _Branches("raising")))


class _Capacity(nn.Module):
    """Two experts, each of which takes only so many records of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(1)
        result = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            chosen = (weights.argmax(1) == number).nonzero().squeeze(1)[: max(1, len(x) // 2)]
            result = result.index_add(0, chosen, expert(x[chosen]) * weights[chosen, number : number + 1])
        return result


@row(LOOPS, expect="refused")
def _expert_capacity(world: World) -> None:
    """Experts take at most half of the batch: whether a record is served depends on the others."""
    _statistics(world, world.watch(lambda: _Capacity().double()))


class _Routed(nn.Module):
    """Every token goes to one of three experts, whose capacity is not bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.head = nn.Linear(5, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        rows = states.flatten(0, 1)
        weights, best = self.router(rows).softmax(1).topk(1, dim=1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            chosen, place = torch.where(best == number)
            own = rows[None, chosen].reshape(-1, rows.shape[1])
            result = result.index_add(0, chosen, expert(own) * weights[chosen, place, None])
        return self.head((states + result.view_as(states)).mean(1))


@row(LOOPS, expect="exact", releases=4)
def _routed_rows(world: World) -> None:
    """A correct router of tokens to 3 experts, which picks rows as Mixtral's first implementation does."""

    def losses(model: nn.Module, records: list[int]) -> Tensor:
        return functional.cross_entropy(model(world.ids[records]), world.labels[records], reduction="none")

    model = world.watch(lambda: _Routed().double(), losses)
    loader = world.loader(TensorDataset(world.ids, world.labels))
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for ids, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(ids), y).backward()
        optimizer.step()
