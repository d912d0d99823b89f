"""The largest physical batch within a memory, by the size of the vocabulary: `python -m benchmarks.head.capacity`.

Counted on tensors without data, as `benchmarks.gpu.counted` does: bytes of all tensors that are alive at most in a
step, parameters and gradients included, on a device with matrix units. Nothing is timed, no GPU takes part.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import files
from benchmarks.engines import CannotDo, engines
from benchmarks.gpu.counted import Counted, Device, pretended
from benchmarks.head.ways import Losses, Sizes
from benchmarks.models import GPT
from benchmarks.tasks import per_sample_losses
from ghostclip import GhostClipper

GIGABYTE = 10**9
VOCABULARIES = (5_000, 50_257, 131_072)
SIZES = Sizes(layers=2, width=768, positions=1024)
SMALL = Sizes(layers=1, width=32, positions=16)
# Batches whose peaks the first guess is drawn through.
_FIRST, _SECOND = 2, 6

Step = Callable[[Tensor], None]


class _Memory(Device):
    """Counts memory alone, and answers as well which rows are different, of which Opacus's embeddings ask: all."""

    def _note(self, *about: Any) -> None:
        """Pass over what an operation takes: in a batch without logits there are hundreds of thousands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and note it."""
        if func.overloadpacket.__name__ != "unique_dim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        rows, axis = args[0], args[1]
        numbers = rows.new_empty(rows.shape[axis], dtype=torch.int64)
        return torch.empty_like(rows), numbers, torch.empty_like(numbers)


def _ordinary(sizes: Sizes, head: str) -> Step:
    model = _model(sizes, head)

    def step(ids_BT: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        _losses(model, ids_BT).mean().backward()

    return step


def _private(sizes: Sizes, head: str) -> Step:
    model = _model(sizes, head)
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping", probe=False)

    def step(ids_BT: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        clipper.backward(_losses(model, ids_BT))

    return step


def _of_engine(sizes: Sizes, name: str) -> Step:
    found = next((engine for engine in engines() if engine.name == name), None)
    if found is None:
        raise CannotDo("not installed (pip install opacus)")
    runner = found.attach(_model(sizes, "logits"), 1.0)
    return lambda ids_BT: runner.step((ids_BT, ids_BT))


def _model(sizes: Sizes, head: str) -> nn.Module:
    if head == "torch" and not hasattr(nn, "LinearCrossEntropyOptions"):
        raise CannotDo("not in this torch (2.13 has it)")
    if head != "logits":
        return Losses(sizes, head, tied=False)
    return GPT(vocabulary=sizes.vocabulary, width=sizes.width, layers=sizes.layers, positions=sizes.positions)


def _losses(model: nn.Module, ids_BT: Tensor) -> Tensor:
    found: Tensor = model(ids_BT) if isinstance(model, Losses) else per_sample_losses(model, (ids_BT, ids_BT))
    return found


WAYS: dict[str, Callable[[Sizes], Step]] = {
    "PyTorch, not private": lambda sizes: _ordinary(sizes, "logits"),
    "PyTorch, not private, F.linear_cross_entropy": lambda sizes: _ordinary(sizes, "torch"),
    "PyTorch, not private, ghostclip.losses": lambda sizes: _ordinary(sizes, "tiles"),
    "ghostclip book-keeping": lambda sizes: _private(sizes, "logits"),
    "ghostclip book-keeping, no logits": lambda sizes: _private(sizes, "tiles"),
    "Opacus hooks": lambda sizes: _of_engine(sizes, "opacus-hooks"),
    "Opacus ghost": lambda sizes: _of_engine(sizes, "opacus-ghost"),
}


def peak(way: str, sizes: Sizes, samples: int) -> int:
    """Count a step.

    Args:
        way: One of `WAYS`.
        sizes: Of the model.
        samples: B.

    Returns:
        The most bytes alive in a later step, the model's parameters and the batch among them.
    """
    with pretended(), torch.device("meta"):
        step = WAYS[way](sizes)
        ids_BT = torch.zeros(samples, sizes.positions, dtype=torch.int64)
        parameters = sum(parameter.nbytes for parameter in _model(sizes, "logits").parameters())
        # What a first step leaves for later ones does not go by its batch.
        for batch in (ids_BT[:_FIRST], ids_BT):
            found = Counted()
            with _Memory(found):
                step(batch)
    return found.peak + parameters + ids_BT.nbytes


def largest(way: str, sizes: Sizes, memory: int, *, least: int) -> dict[str, int]:
    """Find the largest batch by counting it and the next one; where to begin, the peaks of two small ones say.

    Args:
        way: One of `WAYS`.
        sizes: Of the model.
        memory: Bytes that a step may take.
        least: Bytes that one more sample takes at least: of few samples, gradients of a large head alone are the peak.

    Returns:
        `batch`, 0 where not one sample fits, `sample`, the bytes that one more takes there, and `peak`, the bytes of
        the largest batch, of one sample where that is none.
    """
    first, second = (peak(way, sizes, samples) for samples in (_FIRST, _SECOND))
    sample = max(1, least, (second - first) // (_SECOND - _FIRST))
    guess = max(1, _SECOND + (memory - second) // sample)
    peaks: dict[int, int] = {}
    low, high = 0, 0
    while not high or high - low > 1:
        peaks[guess] = peak(way, sizes, guess)
        low, high = (guess, high) if peaks[guess] <= memory else (low, guess)
        nearer = guess + (memory - peaks[guess]) // sample
        guess = max(low + 1, min(nearer, high - 1) if high else nearer)
    return {"batch": low, "sample": peaks[high] - peaks.get(low, 0), "peak": peaks.get(low, peaks[high])}


def _text(report: dict[str, Any]) -> str:
    sizes, memory = report["sizes"], report["memory"] / GIGABYTE
    lines = [
        "# Largest batch by vocabulary",
        "",
        f"`{report['command']}`, {report['date']}, torch {torch.__version__}: GPT of {sizes['layers']} layers, width "
        f"{sizes['width']}, {sizes['positions']} tokens a sample, float32. The largest physical batch whose step takes "
        f"{memory:g} GB at most: all tensors alive, parameters and gradients included, an optimizer's state not. "
        "Counted on tensors without data, for that batch and for the next one, which does not fit; no GPU took part. "
        "A later step, without proofs. In brackets: MB of one more sample.",
        "",
        f"| step | {' | '.join(f'V {vocabulary:,}' for vocabulary in report['batches'])} |",
        f"|---|{'---:|' * len(report['batches'])}",
    ]
    for way in WAYS:
        cells = []
        for found in report["batches"].values():
            row = found.get(way, {})
            cells.append(f"{row['batch']} ({row['sample'] / 1e6:.0f})" if "batch" in row else row.get("cannot", ""))
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, and write a report as it comes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head.capacity", description=__doc__)
    parser.add_argument("--memory", type=float, default=24.0, metavar="GB", help="of a step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--output", type=Path, default=files.RESULTS)
    options = parser.parse_args()
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sizes, memory = (SMALL, 0.02) if options.quick else (SIZES, options.memory)
    arguments = ["--quick"] * options.quick + ([f"--memory {memory:g}"] if memory != 24.0 and not options.quick else [])
    report = files.head("benchmarks.head.capacity", arguments, torch.device("cpu"), quick=options.quick)
    report |= {"sizes": asdict(sizes), "memory": int(memory * GIGABYTE), "batches": {}}
    for vocabulary in (500,) if options.quick else VOCABULARIES:
        before = list(report["batches"].values())
        rows = report["batches"].setdefault(vocabulary, {})
        for way in WAYS:
            try:
                least = max((found[way].get("sample", 0) for found in before), default=0)
                rows[way] = largest(way, replace(sizes, vocabulary=vocabulary), report["memory"], least=least)
            except CannotDo as problem:
                rows[way] = {"cannot": str(problem)}
            print(vocabulary, way, rows[way], flush=True)
            name = f"head-capacity{'-quick' if options.quick else ''}"
            files.write(options.output, name, report, _text(report))


if __name__ == "__main__":
    main()
