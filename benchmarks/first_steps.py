"""What a checked step costs: `python -m benchmarks.first_steps [--tree FOLDER ...]` writes first-steps.md.

A private step that is checked (the first one of a clipper), against a steady one: CPU time, the trees taking turns, and
the most bytes of tensors that are alive in it, counted operation by operation.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import CPU, ROOT, describe, parser
from benchmarks.tree_worker import PREDICTABLE, TreeWorker, commit_of

# Answers "time" by CPU seconds of a first step and of steady ones, "bytes" by the peaks of both.
_WORKER = (
    PREDICTABLE
    + """
import gc, json, logging, sys, time, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
import torch
from torch import nn
from torch.nn import functional as F
sys.path.append(sys.argv[2])
from benchmarks import models
from tests.live import LiveBytes
torch.set_num_threads(1); torch.manual_seed(0)

def classes(model, x, count):
    y = torch.randint(count, x.shape[:1])
    return model, lambda: F.cross_entropy(model(x), y, reduction="none")
def tokens(model, ids, logits=lambda out: out):
    def losses():
        out = logits(model(ids))
        return F.cross_entropy(out[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    return model, losses
def gpt(B, T):
    return tokens(models.GPT(vocabulary=1000, width=256, heads=4, layers=4, positions=T), torch.randint(1000, (B, T)))
def resnet(B):
    return classes(models.ResNet(), torch.randn(B, 3, 32, 32), 10)
def lstm(B, T):
    return classes(models.LSTM(vocabulary=1000), torch.randint(1000, (B, T)), 2)
def lora(B, T):
    import peft, transformers
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), peft.LoraConfig(r=8, target_modules=["c_attn"]))
    ids = torch.randint(50257, (B, T))
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
        def forward(self, ids):
            return self.inner(input_ids=ids).logits
    return tokens(Plain(), ids)

model, losses = eval(sys.argv[1])
def step(clipper):
    clipper.backward(losses())
    for parameter in model.parameters():
        parameter.grad = None
    clipper.reset()
def clipped():
    return ghostclip.GhostClipper(model, max_grad_norm=1.0)
def timed(clipper):
    started = time.process_time()
    step(clipper)
    return time.process_time() - started
def peak(clipper):
    with LiveBytes(beside=model.parameters()) as live:
        step(clipper)
    return live.peak
with clipped() as clipper:
    step(clipper)
gc.disable()
for line in sys.stdin:
    measure = peak if line.strip() == "bytes" else timed
    with clipped() as clipper:
        first = measure(clipper)
        step(clipper)
        steady = [measure(clipper)]
        # The fourth one is checked as well in some versions.
        step(clipper) if measure is peak else steady.append(timed(clipper))
        again = measure(clipper)
    gc.collect()
    print(json.dumps([first, min(steady), again]), flush=True)
"""
)

_SHAPES = {
    "GPT 256x4, T 512, B 8": "gpt(8, 512)",
    "ResNet, 32x32, B 16": "resnet(16)",
    "LSTM, T 64, B 32": "lstm(32, 64)",
    "GPT-2 124M with LoRA, T 32, B 8": "lora(8, 32)",
}


def _measured(trees: Sequence[Path], shape: str, rounds: int) -> list[tuple[float, float, float]]:
    """Return for each tree a first step's CPU time and its peak by those of a steady one, and the CPU milliseconds."""
    workers = [TreeWorker(tree, _WORKER, [shape, str(ROOT)]) for tree in trees]
    try:
        peaks = [worker.ask("bytes") for worker in workers]
        times: list[list[Sequence[float]]] = [[] for _ in workers]
        for number in range(rounds):
            for place in range(len(workers)) if number % 2 else reversed(range(len(workers))):
                times[place].append(workers[place].ask("time"))
    finally:
        for worker in workers:
            worker.end()
    found = []
    for (first_bytes, steady_bytes, _), turns in zip(peaks, times, strict=True):
        steady = min(turn[1] for turn in turns)
        first = statistics.median(turn[0] / turn[1] for turn in turns)
        found.append((first, first_bytes / steady_bytes, steady * 1e3))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as cells come in and write the table, unless a part of the shapes was asked for."""
    given = parser("benchmarks.first_steps", (__doc__ or "").split("\n")[0])
    given.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, before this one")
    given.add_argument("--rounds", type=int, default=7, help="turns of each tree (default: %(default)s)")
    given.add_argument("--only", default="", help="only shapes whose name holds this")
    options = given.parse_args(arguments)
    trees = [*(tree.resolve() for tree in options.tree), ROOT]
    about = describe(CPU)
    names = [commit_of(tree) for tree in trees]
    lines = [
        "# What a first step costs",
        "",
        f"`python -m benchmarks.first_steps`, {about['cpu']}, one thread, Python {about['python']}, "
        f"torch {torch.__version__}. A first private step (forward, backward, clipped sums, every check) by a steady "
        f"one: CPU time, the median of {options.rounds} interleaved turns, and the most bytes of tensors alive beside "
        "the parameters; then CPU milliseconds of a steady step, the least.",
        "",
        "| shape | " + " | ".join(f"{name}: time | bytes | steady, ms" for name in names) + " |",
        "|---|" + "--:|--:|--:|" * len(names),
    ]
    for name, shape in _SHAPES.items():
        if options.only.lower() in name.lower():
            cells = _measured(trees, shape, options.rounds)
            lines.append(f"| {name} | " + " | ".join(f"{a:.2f} | {b:.2f} | {c:.1f}" for a, b, c in cells) + " |")
            print(lines[-1], flush=True)
    if not options.only:
        (options.out / "first-steps.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
