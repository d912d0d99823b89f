"""A step of a GPT on several ranks, with and without privacy, in one run: `python -m benchmarks.sharded --help`.

Both models live in the same processes and take turns, so that whatever else the machine does meets both. A step is
forward, backward and the optimizer's step, and ends when all ranks have ended it. Each rank by itself, without the
others, is the third way: what privacy costs there, several ranks do not add. The time of a rank's own thread is that of
its work, without waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import files, machine
from benchmarks.models import GPT
from ghostclip import DPDataLoader, PrivacyEngine

ALONE = "each by itself"
WAYS = ("fully_shard", "data parallel", ALONE)
LENGTHS = (128, 512)
FIRST_STEPS = 4


class Sizes(NamedTuple):
    """Of the model and the batch.

    Attributes:
        width: Of the model.
        layers: Blocks.
        words: Of the vocabulary.
        samples: Of each rank's batch at the first length; fewer at longer ones, for as many tokens.
    """

    width: int
    layers: int
    words: int
    samples: int


# A small one of few tokens, where what a step costs beside its products weighs most, and that of the report.
SMALL, REPORTED = "GPT-2, width 192", "GPT of the report, width 256"
MODELS = {SMALL: Sizes(192, 3, 1000, 4), REPORTED: Sizes(256, 4, 5000, 16)}
QUICK = Sizes(32, 2, 50, 2)


class _Logits(NamedTuple):
    logits: torch.Tensor


class _Reported(GPT):
    """The GPT of the report, with an output of the form that transformers' models have."""

    def forward(self, ids_BT: torch.Tensor) -> Any:
        return _Logits(super().forward(ids_BT))


def _gpt(name: str, sizes: Sizes, length: int) -> nn.Module:
    torch.manual_seed(0)
    heads = max(1, sizes.width // 64)
    if name == REPORTED:
        return _Reported(
            vocabulary=sizes.words, width=sizes.width, heads=heads, layers=sizes.layers, positions=length
        ).train()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=heads,
        n_positions=length,
        vocab_size=sizes.words,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def _losses(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    logits_BTV = model(ids_BT).logits[:, :-1]
    flat = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return flat.view(len(ids_BT), -1).mean(1)


def _divided(way: str, model: Any, *, private: bool) -> nn.Module:
    if way == "fully_shard":
        for block in model.blocks if isinstance(model, GPT) else model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        if not private:
            model.set_force_sum_reduction_for_comms(True)
    elif way == "data parallel" and not private:
        return nn.parallel.DistributedDataParallel(model)
    return model


def _step(way: str, model: Any, ids_BT: torch.Tensor, *, private: bool) -> Callable[[], None]:
    """Return what makes one step of one way.

    Args:
        way: One of `WAYS`.
        model: A model of this step's own.
        ids_BT: This rank's batch.
        private: Whether with privacy.

    Returns:
        The step.
    """
    model = _divided(way, model, private=private)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if not private:

        def plain() -> None:
            optimizer.zero_grad()
            _losses(model, ids_BT).mean().backward()
            optimizer.step()

        return plain
    ranks = 1 if way == ALONE else distributed.get_world_size()
    records = TensorDataset(torch.zeros(ranks * len(ids_BT), 1))
    loader: Any = DataLoader(records, batch_size=ranks * len(ids_BT))
    if way == ALONE:
        loader = DPDataLoader.from_data_loader(loader, distributed=False)
    engine = PrivacyEngine()
    module, private_optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        poisson_sampling=way == ALONE,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )

    def draws() -> Any:
        while True:
            yield from loader

    batches = draws()

    def step() -> None:
        next(batches)
        private_optimizer.zero_grad()
        _losses(module, ids_BT).mean().backward()
        private_optimizer.step()

    return step


def _rank(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    machine.keep_heap()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    found = []
    for name, full in MODELS.items():
        sizes = QUICK if options.quick else full
        for way in WAYS:
            for length in (16,) if options.quick else LENGTHS:
                samples = max(1, sizes.samples * LENGTHS[0] // length)
                ids_BT = torch.randint(sizes.words, (samples, length), generator=torch.Generator().manual_seed(rank))
                steps = {
                    private: _step(way, _gpt(name, sizes, length), ids_BT, private=private) for private in (False, True)
                }
                row = {"model": name, "way": way, "T": length, "B": samples}
                found.append({**row, **_timed(steps, options.rounds)})
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)


def _timed(steps: dict[bool, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the seconds of a step without and with privacy, and the median of their ratios in one round each."""
    taken: dict[bool, list[float]] = {private: [] for private in steps}
    worked: dict[bool, list[float]] = {private: [] for private in steps}
    for number in range(FIRST_STEPS + rounds):
        for private, step in steps.items():
            distributed.barrier()
            begun, thread = time.perf_counter(), time.thread_time()
            step()
            thread = time.thread_time() - thread
            distributed.barrier()
            if number >= FIRST_STEPS:
                taken[private].append(time.perf_counter() - begun)
                worked[private].append(thread)
    ratios = [own / plain for own, plain in zip(taken[True], taken[False], strict=True)]
    return {
        "plain_seconds": statistics.median(taken[False]),
        "private_seconds": statistics.median(taken[True]),
        "ratio": statistics.median(ratios),
        "plain_thread_seconds": statistics.median(worked[False]),
        "private_thread_seconds": statistics.median(worked[True]),
    }


def _markdown(report: dict[str, Any]) -> str:
    lines = [
        f"A step on {report['ranks']} ranks (gloo), {report['machine']['cpu']}; made by `{report['command']}`.",
        "",
        "| model | | T | B a rank | s, no privacy | s, private | ratio | s of a rank's thread, no privacy | private "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['way']} | {row['T']} | {row['B']} | {row['plain_seconds']:.3f} "
        f"| {row['private_seconds']:.3f} | {row['ratio']:.2f} "
        f"| {row['plain_thread_seconds']:.3f} | {row['private_thread_seconds']:.3f} "
        f"| {row['private_thread_seconds'] / row['plain_thread_seconds']:.2f} |"
        for row in report["rows"]
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the files.

    Args:
        arguments: The command line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: does it run, not how fast")
    parser.add_argument("--out", type=Path, default=files.RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    given = list(arguments) if arguments is not None else [f"--ranks={options.ranks}", f"--rounds={options.rounds}"]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, args=(options.ranks, folder, options), nprocs=options.ranks)
        rows = json.loads(Path(folder, "found.json").read_text())
    device = torch.device("cpu")
    machine.keep_heap()
    report = {
        **files.head("benchmarks.sharded", given, device, quick=options.quick),
        "ranks": options.ranks,
        "rows": rows,
    }
    files.write(options.out, files.stem("sharded", device, quick=options.quick), report, _markdown(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
