"""CPU time of a step: ordinary training, compiled and not, book-keeping, and the private step as one graph."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ghostclip
from benchmarks.engines import CannotDo
from benchmarks.harness import table
from benchmarks.models import GPT, LSTM, MnistCNN

WAYS = ("ordinary", "ordinary, compiled", "book-keeping", "graph")
JAX = "JAX vmap + jit"


def token_losses(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of each sample's next tokens, shape ``(B,)``."""
    logits_BTV = model(ids_BT)[:, :-1]
    losses = functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids_BT), -1).mean(1)


def class_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each sample's class, shape ``(B,)``."""
    return functional.cross_entropy(model(x), y, reduction="none")


@dataclass(frozen=True)
class Task:
    """A model, a batch, its losses, the ratio to compiled ordinary training that is aimed at, and a peer's batch."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    losses: Callable[..., Tensor]
    aim: float
    peer_batch: Callable[..., tuple[Tensor, Tensor]] = lambda x, y: (x, y)


def _next_tokens(ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, of one position less than `token_losses` runs the model on."""
    return ids_BT[:, :-1], ids_BT[:, 1:]


def _images(samples: int) -> tuple[Tensor, ...]:
    return torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,))


def _cnn(samples: int, aim: float) -> Task:
    return Task(f"cnn-{samples}", f"MNIST CNN, B {samples}", MnistCNN, lambda: _images(samples), class_losses, aim)


TASKS = (
    Task("gpt-small", "GPT, 4 layers, d 128, T 64, V 500, B 16", lambda: GPT(vocabulary=500, width=128, positions=64),
         lambda: (torch.randint(500, (16, 64)),), token_losses, 1.2, _next_tokens),
    Task("gpt", "GPT, 4 layers, d 256, T 128, V 5000, B 16", GPT, lambda: (torch.randint(5000, (16, 128)),),
         token_losses, 1.1, _next_tokens),
    _cnn(16, 1.5),
    _cnn(64, 1.3),
    _cnn(256, 1.2),
    Task("lstm", "LSTM, d 100, T 64, B 64", LSTM, lambda: (torch.randint(10_004, (64, 64)), torch.randint(2, (64,))),
         class_losses, 1.5),
)  # fmt: skip


class Ways:
    """One task run in several ways, each on a model of its own with the same parameters."""

    def __init__(self, task: Task, batch: tuple[Tensor, ...]) -> None:
        """Attach all ways; nothing is computed or compiled yet."""
        self._losses, self._batch = task.losses, batch
        self._models = {name: task.model() for name in WAYS}
        for model in self._models.values():
            model.load_state_dict(self._models["ordinary"].state_dict())
        self._compiled = torch.compile(self._models["ordinary, compiled"])
        self._clippers = {
            name: ghostclip.GhostClipper(self._models[name], max_grad_norm=1.0, strategy=strategy)
            for name, strategy in (("book-keeping", "bookkeeping"), ("graph", "graph"))
        }
        options = ghostclip.GraphOptions(cache=False)
        self.step = ghostclip.GraphStep(self._clippers["graph"], task.losses, options=options)
        runs = (
            lambda: self._ordinary(self._models["ordinary"]),
            lambda: self._ordinary(self._compiled),
            self._bookkeeping,
            lambda: self.step(*batch),
        )
        self.runs: dict[str, Callable[[], Any]] = dict(zip(WAYS, runs, strict=True))
        jax = _in_jax(task.model(), self._models["ordinary"].state_dict(), task.peer_batch(*batch))
        if jax is not None:
            self.runs[JAX] = jax

    def _ordinary(self, model: Any) -> None:
        self._losses(model, *self._batch).mean().backward()

    def _bookkeeping(self) -> None:
        clipper = self._clippers["book-keeping"]
        clipper.backward(self._losses(self._models["book-keeping"], *self._batch))

    def let_go(self, way: str) -> None:
        """Drop the gradients or sums of one way."""
        if way in self._clippers:
            self._clippers[way].reset()
        elif way in self._models:
            self._models[way].zero_grad()


def _in_jax(model: nn.Module, state: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> Callable[[], Any] | None:
    """Return a step in JAX, compiled; None where it is not installed or the model is not written in it."""
    # XLA counts all threads as its own, and is given as many as torch has here.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    if find_spec("jax") is None:
        return None
    from benchmarks.peers.jax import Jax

    model.load_state_dict(state)
    try:
        peer = Jax(model, 1.0)
    except CannotDo:
        return None
    peer.prepare(batch)
    return lambda: peer.step(batch)


def measure(task: Task, *, rounds: int) -> dict[str, Any]:
    """Measure one task."""
    torch.manual_seed(0)
    batch = task.batch()
    ways = Ways(task, batch)
    begun, clock = time.process_time(), time.perf_counter()
    ways.runs["graph"]()
    first = {"compile_cpu_s": time.process_time() - begun, "compile_s": time.perf_counter() - clock}
    for name in [*ways.runs, *ways.runs]:
        ways.let_go(name)
        ways.runs[name]()
    taken: dict[str, list[float]] = {name: [] for name in ways.runs}
    for _ in range(rounds):
        for name in ways.runs:
            begun = time.process_time()
            ways.let_go(name)
            ways.runs[name]()
            taken[name].append(time.process_time() - begun)
    graphs = ways.step.graphs
    return {
        "name": task.name,
        "title": task.title,
        "aim": task.aim,
        "milliseconds": {name: 1000 * statistics.median(own) for name, own in taken.items()},
        **first,
        "nodes": len(graphs[0].graph.graph.nodes) if graphs else None,
        "eager": dict(ways.step.reasons),
    }


def text(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    about = (
        "# The private step as one graph: CPU time\n\n"
        f"`{report['command']}`, {report['date']}: one thread of {report['machine']['cpu']}, torch "
        f"{report['machine']['versions']['torch']}, float32, ways interleaved; medians of {report['rounds']} rounds, "
        "in milliseconds of CPU time, with the ratio to compiled ordinary training. Compiling: seconds by the clock of "
        "the first step of the graph on a machine that others used at the same time (in brackets CPU time of the "
        "process itself). JAX: where it is installed and the model is written in it.\n\n"
    )
    lines = []
    for row in report["rows"]:
        own = row["milliseconds"]
        base = own["ordinary, compiled"]
        cells = {name: f"{own[name]:.1f} ({own[name] / base:.2f}×)" for name in own}
        compiling = f"{row['compile_s']:.0f} s ({row['compile_cpu_s']:.0f} s)"
        shown = [*(cells[name] for name in WAYS), f"{row['aim']:.2f}×", cells.get(JAX, "-"), compiling]
        lines.append([row["title"], *shown])
    return about + table(" | ".join(["model", *WAYS, "aim", JAX, "compiling"]), lines)
