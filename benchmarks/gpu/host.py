"""What a private step costs the host: `python -m benchmarks.gpu.host [--tree FOLDER ...]` writes host-cost.

A GPU waits for a host that is slower than it. Models of many tiny layers have no work but the host's: CPU time of a
private step against an ordinary one of the same model with the same optimizer, in turns, on one thread; operations that
reach torch's dispatcher; and values that the host reads in a step, for each of which a device would be waited for.
With ``--instructions`` what the processor executes is counted as well, by Valgrind: no neighbour on the machine, and no
clock of its own, changes that number.
"""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, head, parser, write
from benchmarks.report import heading
from benchmarks.tree_worker import PREDICTABLE, TreeWorker, commit_of

STRATEGIES = ("bookkeeping", "ghost", "graph")
# Valgrind takes fifty times as long.
COUNTED = ("bookkeeping",)
# GPT-2; small layers one after the other; GPT-2 of which adapters alone are trained.
MODELS = {"gpt2": STRATEGIES, "stack": STRATEGIES, "lora": COUNTED}
LAYERS = 36

# Runs in a process of its own for each tree, with nothing of this one on its path but how reads are counted; answers
# each line by a line.
_WORKER = (
    PREDICTABLE
    + """
import gc, importlib.util, json, logging, sys, time, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
import torch
from torch import nn
from torch.nn import functional as F
from ghostclip.optim import DPOptimizer
name, strategy, layers, reads_file = sys.argv[1:]
torch.set_num_threads(1)

class Stack(nn.Module):
    def __init__(self, count):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
        self.blocks = nn.Sequential(*[block() for _ in range(count)])
    def forward(self, x):
        return self.blocks(x)

def made():
    torch.manual_seed(0)
    if name == "stack":
        return Stack(int(layers)), torch.randn(4, 8)
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_layer=int(layers), n_embd=16, n_head=2, vocab_size=64, n_positions=16,
                        resid_pdrop=0, attn_pdrop=0, embd_pdrop=0)
    model = GPT2LMHeadModel(config)
    if name == "lora":
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return model, torch.randint(64, (4, 8))
def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]

def losses(model, x):
    if name == "stack":
        return model(x).square().sum(1)
    logits = model(x, use_cache=False).logits
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return each.view(len(x), -1).mean(1)

plain, x = made()
optimizer = torch.optim.AdamW(trained(plain), lr=1e-3)
model, _ = made()
clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
private_optimizer = DPOptimizer(
    torch.optim.AdamW(trained(model), lr=1e-3), noise_multiplier=1.0, expected_batch_size=4, clipper=clipper)

def ordinary():
    optimizer.zero_grad(); losses(plain, x).mean().backward(); optimizer.step()
if strategy == "graph":
    whole = ghostclip.GraphStep(clipper, losses)
def backward():
    private_optimizer.zero_grad()
    whole(x) if strategy == "graph" else clipper.backward(losses(model, x))
def private():
    backward(); private_optimizer.step()

def calls(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        step()
    return sum(event.count for event in profiled.key_averages() if event.key.startswith("aten::"))

def reads():
    # Of an ordinary step and of a private one: some models read values of their own.
    spec = importlib.util.spec_from_file_location("host_reads", reads_file)
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    from ghostclip.kernels import runtime
    before, runtime.wait = runtime.wait, lambda tensor: True
    # The optimizers' own reads of how many steps they took, which lies on the host, are no part of it.
    inner = private_optimizer.original_optimizer
    steps = optimizer.step, inner.step
    optimizer.step = inner.step = lambda: None
    counts = []
    for step in (ordinary, private):
        step()
        with module.host_reads() as found:
            step()
        counts.append(len(found))
    optimizer.step, inner.step = steps
    runtime.wait = before
    return counts

# The forwards that are proved, or compiled, come first.
for _ in range(18):
    ordinary(); private()
assert strategy != "graph" or (whole.graphs and not whole.reasons), "a step ran eagerly"
gc.collect(); gc.disable()
for line in sys.stdin:
    if line.strip() == "count":
        answer = [calls(ordinary), calls(private), *reads()]
    elif line.strip() == "instructions":
        answer = []
        for step in (ordinary, private):
            torch._C._valgrind_toggle()
            step()
            torch._C._valgrind_toggle_and_dump_stats()
    else:
        answer = []
        for step in (ordinary, private):
            started = time.process_time()
            step()
            answer.append(time.process_time() - started)
        gc.collect()
    print(json.dumps(answer), flush=True)
"""
)


def measured(trees: Sequence[Path], model: str, strategy: str, *, rounds: int, layers: int) -> list[dict[str, Any]]:
    """Measure a model in several trees.

    Args:
        trees: Checkouts, which take turns.
        model: One of `MODELS`.
        strategy: How it clips; "graph" runs one compiled graph, the ordinary step beside it is eager.
        rounds: Turns of each tree, one step of each kind.
        layers: Blocks of the model.

    Returns:
        One row a tree.
    """
    workers = [
        TreeWorker(tree, _WORKER, [model, strategy, str(layers), str(ROOT / "tests" / "host_reads.py")])
        for tree in trees
    ]
    try:
        counts = [worker.ask("count") for worker in workers]
        times: list[list[list[float]]] = [[] for _ in workers]
        for _ in range(rounds):
            for place, worker in enumerate(workers):
                times[place].append(worker.ask("time"))
    finally:
        for worker in workers:
            worker.end()
    return [
        _row(tree, (model, strategy, layers), count, taken)
        for tree, count, taken in zip(trees, counts, times, strict=True)
    ]


def instructions(tree: Path, model: str, strategy: str, *, layers: int) -> tuple[int, int]:
    """Count what the processor executes in a step, as Valgrind shows it: equal in all runs but for a few in 1,000."""
    with tempfile.TemporaryDirectory() as folder:
        under = (
            "valgrind", "--quiet", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={folder}/found"
        )  # fmt: skip
        arguments = [model, strategy, str(layers), str(ROOT / "tests" / "host_reads.py")]
        worker = TreeWorker(tree, _WORKER, arguments, under)
        try:
            worker.ask("instructions")
        finally:
            worker.end()
        files = [Path(folder, f"found.{number}") for number in (1, 2)]
        ordinary, private = (int(re.search(r"^totals: (\d+)", file.read_text(), re.MULTILINE)[1]) for file in files)  # type: ignore[index]
    return ordinary, private


def _row(
    tree: Path, what: tuple[str, str, int], count: Sequence[float], taken: Sequence[Sequence[float]]
) -> dict[str, Any]:
    (model, strategy, layers), (ordinary, private) = what, zip(*taken, strict=True)
    return {
        "tree": commit_of(tree),
        "model": f"{model}, {layers} blocks",
        "strategy": strategy,
        "ordinary_ms": min(ordinary) * 1e3,
        "private_ms": min(private) * 1e3,
        "ratio": min(private) / min(ordinary),
        "ratio_of_medians": statistics.median(private) / statistics.median(ordinary),
        "ordinary_calls": int(count[0]),
        "private_calls": int(count[1]),
        "more_calls_a_block": (count[1] - count[0]) / layers,
        "ordinary_reads": int(count[2]),
        "private_reads": int(count[3]),
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | strategy | tree | ordinary, ms | private, ms | ratio | of medians | 10⁶ instructions: ordinary"
        " | private | ratio | calls: ordinary | private | more a block | values read: ordinary | private |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['model']} | {row['strategy']} | {row['tree']} | {row['ordinary_ms']:.1f} | {row['private_ms']:.1f} | "
        f"{row['ratio']:.2f} | {row['ratio_of_medians']:.2f} | {_executed(row)} | "
        f"{row['ordinary_calls']} | {row['private_calls']} | {row['more_calls_a_block']:.1f} | "
        f"{row['ordinary_reads']} | {row['private_reads']} |"
        for row in rows
    ]
    return "\n".join(lines)


def _executed(row: dict[str, Any]) -> str:
    ordinary, private = row.get("instructions") or (0, 0)
    if not ordinary:
        return " | | "
    return f"{ordinary / 1e6:.1f} | {private / 1e6:.1f} | {private / ordinary:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as rows come in and write them."""
    options = parser("benchmarks.gpu.host", (__doc__ or "").split("\n")[0])
    options.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, before this one")
    options.add_argument("--rounds", type=int, default=40, help="turns of each tree (default: %(default)s)")
    options.add_argument("--layers", type=int, default=LAYERS, help="blocks of each model (default: %(default)s)")
    options.add_argument("--instructions", action="store_true", help="count them too (needs valgrind; half an hour)")
    given = options.parse_args(arguments)
    if given.instructions and shutil.which("valgrind") is None:
        options.error("--instructions needs valgrind, which is not installed")
    report = head("benchmarks.gpu.host", arguments)
    report["rows"] = rows = []
    trees = [*(tree.resolve() for tree in given.tree), ROOT]
    for model, strategies in MODELS.items():
        for strategy in strategies:
            found = measured(trees, model, strategy, rounds=given.rounds, layers=given.layers)
            if given.instructions and strategy in COUNTED:
                for tree, row in zip(trees, found, strict=True):
                    row["instructions"] = instructions(tree, model, strategy, layers=given.layers)
            rows += found
            print(_table(rows[-len(trees) :]).split("\n", 2)[2], flush=True)
    text = (
        "CPU time of a step of tiny layers (B 4; GPT-2: T 8, width 16; lora: adapters of rank 4 on c_attn alone are "
        "trained), AdamW, one thread, the least of "
        f"{given.rounds} turns that ordinary and private steps of all trees take; operations that torch's profiler "
        "sees; values that the host reads in a private step."
        + " Instructions are those that Valgrind counts, on a processor with AVX2."
        * given.instructions
    )
    write(
        given.out, "host-cost", report, f"# What a step costs the host\n\n{heading(report)}\n{text}\n\n{_table(rows)}\n"
    )


if __name__ == "__main__":
    main()
