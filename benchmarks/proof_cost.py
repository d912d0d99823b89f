"""What proved norms cost: `python -m benchmarks.proof_cost [--tree FOLDER ...]` writes cost-of-proof.md.

Private steps of well-conditioned batches, in this tree and in other checkouts that are named: operations that reach
torch's dispatcher, which are exact, and CPU time, the least of many short turns that the trees take one after another.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.tree_worker import PREDICTABLE, TreeWorker

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
STRATEGIES = ("bookkeeping", "ghost")
PROCESSES = 3

# Runs in a process of its own for each tree, with nothing of this one on its path. Speaks by lines: a number of steps
# is answered by the least CPU seconds of one, "count" by the operations of a step.
_WORKER = (
    PREDICTABLE
    + """
import gc, json, logging, sys, time, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
torch.set_num_threads(1); torch.manual_seed(0)
shape, strategy = sys.argv[1:]

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.first, self.second = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        parts = self.qkv(self.first(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))

class GPT(nn.Module):
    def __init__(self, d, layers, T, V):
        super().__init__()
        self.token, self.place = nn.Embedding(V, d), nn.Embedding(T, d)
        self.blocks, self.norm = nn.Sequential(*[Block(d) for _ in range(layers)]), nn.LayerNorm(d)
    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]).expand(ids.shape))
        return F.linear(self.norm(self.blocks(x)), self.token.weight)

def labelled(model, *size, classes=10):
    return model, torch.randn(size), torch.randint(classes, size[:1])
def mnist_cnn(B):
    return labelled(nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)), B, 1, 28, 28)
def cnn(B):
    return labelled(nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(128, 10)), B, 3, 32, 32)
def mlp(B):
    return labelled(nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10)), B, 784)
def linear(d, T, B):
    return nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d), nn.Linear(d, d)), torch.randn(B, T, d), None
def gpt(d, layers, T, B):
    ids = torch.randint(1000, (B, T))
    return GPT(d, layers, T, 1000), ids, ids

model, x, y = eval(shape)
def losses():
    out = model(x)
    if y is None:
        return out.square().mean((1, 2))
    if out.dim() == 3:
        return F.cross_entropy(out[:, :-1].transpose(1, 2), y[:, 1:], reduction="none").mean(1)
    return F.cross_entropy(out, y, reduction="none")
clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
def step():
    clipper.backward(losses())
    for parameter in model.parameters():
        parameter.grad = None
    clipper.reset()
class Count(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))
# The forwards that are proved come first.
for _ in range(18):
    step()
gc.disable()
for line in sys.stdin:
    if line.strip() == "count":
        # Views and allocations included, as each of them is a call.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            step()
        answer = sum(event.count for event in profiled.key_averages() if event.key.startswith("aten::"))
    else:
        times = []
        for _ in range(int(line)):
            started = time.process_time()
            step()
            times.append(time.process_time() - started)
        gc.collect()
        answer = min(times)
    print(json.dumps(answer), flush=True)
"""
)

_SHAPES = {
    "MNIST CNN, B 64": "mnist_cnn(64)",
    "CNN of three layers, 32x32, B 16": "cnn(16)",
    "MLP 784-1024-1024-10, B 64": "mlp(64)",
    "Linear 768, T 32, B 8": "linear(768, 32, 8)",
    "GPT 512x2, T 128, B 8": "gpt(512, 2, 128, 8)",
}


# One thread, and a heap that is kept, see `machine.keep_heap`: page faults would be chance, and most of the noise.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "5",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


@dataclass
class _Cell:
    """One shape and strategy.

    Attributes:
        calls: Operations of a step, by tree.
        seconds: Least CPU seconds of a step, by tree.
    """

    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def _measured(trees: Sequence[Path], shape: str, strategy: str, rounds: int) -> _Cell:
    cell = _Cell([0] * len(trees), [float("inf")] * len(trees))
    # Where a process's tensors happen to lie is worth some hundredths: the least of several processes.
    for _ in range(PROCESSES):
        workers = [TreeWorker(tree, _WORKER, [shape, strategy], _ENVIRONMENT) for tree in trees]
        try:
            cell.calls = [int(worker.ask("count")) for worker in workers]
            once = max(worker.ask("3") for worker in workers)
            steps = str(max(3, min(30, round(0.1 / once))))
            for number in range(-(-rounds // PROCESSES)):
                for place in range(len(workers)) if number % 2 else reversed(range(len(workers))):
                    cell.seconds[place] = min(cell.seconds[place], workers[place].ask(steps))
        finally:
            for worker in workers:
                worker.end()
    return cell


def _commit(tree: Path) -> str:
    asked = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _table(names: Sequence[str], cells: dict[tuple[str, str], _Cell]) -> list[str]:
    lines = ["| shape | strategy | " + " | ".join(f"{name}: calls | ms | ratio" for name in names) + " |"]
    lines.append("|---|---|" + "--:|--:|--:|" * len(names))
    for (shape, strategy), cell in cells.items():
        entries = [
            f"{calls} | {seconds * 1e3:.2f} | {seconds / cell.seconds[0]:.3f}"
            for calls, seconds in zip(cell.calls, cell.seconds, strict=True)
        ]
        lines.append(f"| {shape} | {strategy} | " + " | ".join(entries) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as cells come in and write the table.

    Args:
        arguments: Those of the command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof_cost", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, before this one")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each tree (default: %(default)s)")
    parser.add_argument("--only", default="", help="only shapes whose name holds this")
    parser.add_argument("--strategy", default="", choices=["", *STRATEGIES], help="only this strategy")
    parser.add_argument("--out", type=Path, help="folder for the file; a part of the shapes writes none without it")
    options = parser.parse_args(arguments)
    trees = [*(tree.resolve() for tree in options.tree), ROOT]
    cells = {}
    for name, shape in _SHAPES.items():
        for strategy in STRATEGIES:
            if options.only.lower() in name.lower() and options.strategy in {"", strategy}:
                cell = cells[name, strategy] = _measured(trees, shape, strategy, options.rounds)
                print(_table([], {(name, strategy): cell})[-1], cell.calls, end=" ")
                print(*(f"{seconds * 1e3:.3f} ms" for seconds in cell.seconds), end=" ")
                print(*(f"x{seconds / cell.seconds[0]:.3f}" for seconds in cell.seconds[1:]), flush=True)
    whole = not options.only and not options.strategy
    out = options.out or (RESULTS if whole else None)
    if out is not None:
        (out / "cost-of-proof.md").write_text(_report([_commit(tree) for tree in trees], cells, options.rounds))


def _report(names: Sequence[str], cells: dict[tuple[str, str], _Cell], rounds: int) -> str:
    about = machine.describe(torch.device("cpu"))
    head = [
        "# Cost of proved norms",
        "",
        f"`python -m benchmarks.proof_cost`, {about['cpu']}, one thread, Python {about['python']}, "
        f"torch {torch.__version__}. Forward, backward and clipped sums of one batch: operations that torch's profiler "
        f"sees, and CPU time, the least of {rounds} interleaved turns of each tree.",
        "",
    ]
    return "\n".join([*head, *_table(names, cells), ""])


if __name__ == "__main__":
    main()
