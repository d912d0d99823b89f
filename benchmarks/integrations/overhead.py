"""What a step through `DPTrainer` costs beside the same step in a plain private loop.

`python -m benchmarks.integrations.overhead`. Both train the same model on the same draws in turns, step by step, the
trainer in a thread that a callback stops after each step. CPU time of the process is counted, everything between two
steps included (logs, schedule, callbacks, ε).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.files import RESULTS, head, write
from benchmarks.loops.hugging import quiet
from benchmarks.machine import keep_heap
from ghostclip import BatchMemoryManager, DPDataLoader, PrivacyEngine
from ghostclip.losses import token_losses

_RECORDS, _BATCH, _LENGTH, _VOCABULARY = 512, 16, 128, 5000
_SIGMA, _CLIP, _SEED = 1.0, 1.0, 5
# In the first steps the engine examines the model.
_WARM = 8


def _model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=_VOCABULARY,
            n_positions=_LENGTH,
            n_embd=256,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _records() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(_VOCABULARY, (_RECORDS, _LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def _collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}


class Turns:
    """Lets a function in a thread go on from one point to the next."""

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._go.acquire()
        work(self._point)
        self._done.release()

    def _point(self) -> None:
        self._done.release()
        self._go.acquire()

    def turn(self) -> float:
        """Let it go on to the next point, and return the CPU time in seconds."""
        begun = time.process_time()
        self._go.release()
        self._done.acquire()
        return time.process_time() - begun


def plain(steps: int) -> Callable[[Callable[[], None]], None]:
    """Return a plain private loop."""

    def work(point: Callable[[], None]) -> None:
        model = _model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = DPDataLoader(
            _records(),  # type: ignore[arg-type]
            batch_size=_BATCH,
            collate_fn=_collate,
            generator=torch.Generator().manual_seed(2 * _SEED),
        )
        model.train()
        _, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=_SIGMA,
            max_grad_norm=_CLIP,
            noise_generator=torch.Generator().manual_seed(2 * _SEED + 1),
            wrap_model=False,
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=_BATCH, optimizer=optimizer) as physical:
            for batch in _again(physical):
                optimizer.zero_grad()
                labels = batch["labels"]
                token_losses(model(input_ids=batch["input_ids"]).logits, labels).mean().backward()
                optimizer.step()
                if not optimizer.last_step_was_virtual:
                    schedule.step()
                    point()

    return work


def _again(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def trainer(steps: int, folder: Path) -> Callable[[Callable[[], None]], None]:
    """Return a training through `DPTrainer`."""
    from transformers import PrinterCallback, TrainerCallback

    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    def work(point: Callable[[], None]) -> None:
        class Stops(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                point()

        arguments = DPTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=_BATCH,
            max_steps=steps,
            learning_rate=1e-4,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_steps=10,
            noise_multiplier=_SIGMA,
            target_delta=1e-5,
            max_grad_norm=_CLIP,
            reproducible_seed=_SEED,
        )
        made = DPTrainer(_model(), arguments, train_dataset=_records(), data_collator=_collate, callbacks=[Stops()])
        made.remove_callback(PrinterCallback)
        made.train()

    return work


def measure(rounds: int) -> dict[str, Any]:
    """Measure."""
    quiet()
    steps = rounds + _WARM + 1
    found: dict[str, list[float]] = {"plain": [], "DPTrainer": []}
    with tempfile.TemporaryDirectory() as folder:
        loops = {"plain": Turns(plain(steps)), "DPTrainer": Turns(trainer(steps, Path(folder)))}
        for number in range(rounds + _WARM):
            names = list(loops) if number % 2 else list(reversed(loops))
            for name in names:
                seconds = loops[name].turn()
                if number >= _WARM:
                    found[name].append(seconds)
    ratios = [one / other for one, other in zip(found["DPTrainer"], found["plain"], strict=True)]
    return {
        "seconds": found,
        "ratio_of_sums": sum(found["DPTrainer"]) / sum(found["plain"]),
        "median_ratio": statistics.median(ratios),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.integrations.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each that count (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_heap()
    words = sys.argv[1:] if arguments is None else arguments
    report = head("benchmarks.integrations.overhead", words, torch.device("cpu"), quick=False) | measure(options.rounds)
    machine, means = report["machine"], {name: 1e3 * statistics.mean(v) for name, v in report["seconds"].items()}
    text = (
        "# A step through DPTrainer\n\n"
        f"`{report['command']}`, {report['date']}; {machine['cpu']}, one thread; transformers "
        f"{machine['versions']['transformers']}, torch {machine['versions']['torch']}; commit "
        f"{str(machine['commit'])[:10]}.\n\n"
        f"GPT-2, 4 layers, d 256, T {_LENGTH}, V {_VOCABULARY}, Poisson batches of {_BATCH} on average, "
        f"{options.rounds} steps of each in turns on the same draws, CPU time from step to step, ε logged every 10.\n"
        f"\n| loop | CPU, ms a step |\n|---|---:|\n"
        + "".join(f"| {name} | {mean:.1f} |\n" for name, mean in means.items())
        + f"\nDPTrainer / plain private loop: {report['ratio_of_sums']:.4f} of the sums, {report['median_ratio']:.4f} "
        "in the median step.\n"
    )
    print(text)
    print(f"written: {write(options.out, 'integrations-overhead', report, text)}.json, .md")
    return int(report["ratio_of_sums"] > 1.03)


if __name__ == "__main__":
    sys.exit(main())
