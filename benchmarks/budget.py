"""Memory and operations under memory budgets, and what a step holds as it goes: `python -m benchmarks.budget`.

Live bytes, counted operation by operation, gradients included and the model's own tensors not: the same on every
machine. Batches that fit under a cap follow from the peaks of one and of two samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import files, machine
from benchmarks.flops import counter
from benchmarks.head.ways import Sizes, maker
from benchmarks.live import course_of, peak_of
from benchmarks.models import GPT
from benchmarks.peers import every_engine
from benchmarks.tasks import Task, find, per_sample_losses
from ghostclip import GhostClipper

MEBIBYTE = 2**20
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
# Until a model was proved and planned for.
STEPS = 4
COURSES = (
    "ordinary",
    "ordinary, torch's linear_cross_entropy",
    "book-keeping, logits",
    "book-keeping, no logits",
)
VOCABULARIES = (5_000, 50_257, 131_072)
CAP = 2 * 2**30


def _budgets(task: Task) -> list[dict[str, float]]:
    """Return peaks and operations under every budget, over those of an ordinary step."""
    device = torch.device("cpu")
    model, batch = task.model(device), task.batch(device)
    beside = [*model.parameters(), *batch]

    def ordinary() -> None:
        model.zero_grad(set_to_none=True)
        per_sample_losses(model, batch).mean().backward()

    ordinary()
    peak, flops = peak_of(ordinary, beside=beside), _flops(ordinary)
    rows = []
    for budget in BUDGETS:
        with GhostClipper(model, max_grad_norm=1.0, memory_budget=budget) as clipper:

            def private(clipper: GhostClipper = clipper) -> None:
                model.zero_grad(set_to_none=True)
                clipper.backward(per_sample_losses(model, batch))

            first = max(peak_of(private, beside=beside) for _ in range(STEPS))
            row = {"budget": budget, "first": first / peak, "later": peak_of(private, beside=beside) / peak}
            rows.append(row | {"flops": _flops(private) / flops})
            expected = clipper.coverage().expected_share
            if expected is not None:
                rows[-1]["expected"] = expected
    return rows


def _flops(step: Callable[[], None]) -> int:
    with counter() as counted:
        step()
    return int(counted.get_total_flops())


def _step(name: str, sizes: Sizes) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a step of one way to compute a head's loss, and what lies beside it."""
    step = maker(name, sizes, tied=False)()
    ids_BT = torch.randint(sizes.vocabulary, (sizes.samples, sizes.positions))

    def run() -> None:
        step.step(ids_BT)

    return run, [*step.model.parameters(), ids_BT]


def _course(name: str, sizes: Sizes) -> list[int]:
    run, beside = _step(name, sizes)
    for _ in range(STEPS):
        run()
    return course_of(run, beside=beside)


def _largest(one: int, two: int) -> int:
    """Return how many samples fit under the cap, of a peak that grows by the same for every sample."""
    return max(0, 1 + int((CAP - one) // max(1, two - one))) if one <= CAP else 0


def _batches(vocabulary: int, sizes: Sizes) -> dict[str, int]:
    """Return the largest batch under the cap of every way, Opacus's modes among them."""
    found = {}
    for name in COURSES:
        peaks = []
        for samples in (1, 2):
            run, beside = _step(name, replace(sizes, vocabulary=vocabulary, samples=samples))
            run()
            run()
            peaks.append(peak_of(run, beside=beside))
        found[name] = _largest(*peaks)
    for engine in every_engine():
        if engine.name in ("opacus-hooks", "opacus-ghost"):
            found[engine.title] = _largest(*(_peak_of_engine(engine, vocabulary, sizes, n) for n in (1, 2)))
    return found


def _peak_of_engine(engine: Any, vocabulary: int, sizes: Sizes, samples: int) -> int:
    torch.manual_seed(0)
    model = GPT(vocabulary=vocabulary, width=sizes.width, layers=sizes.layers, positions=sizes.positions)
    ids_BT = torch.randint(vocabulary, (samples, sizes.positions + 1))
    batch = ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
    runner = engine.attach(model, 1.0)
    runner.step(batch)
    return peak_of(lambda: runner.step(batch), beside=[*model.parameters(), *batch])


def _draw(courses: dict[str, Sequence[int]], path: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, course in courses.items():
        share = [number / max(1, len(course) - 1) for number in range(len(course))]
        panel.plot(share, [taken / MEBIBYTE for taken in course], label=name, linewidth=1.4)
    panel.set_xlabel("operations of a step, forward and backward, from first to last")
    panel.set_ylabel("MiB of live tensors beside the model")
    panel.set_title(title, fontsize=10)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _text(report: dict[str, Any]) -> str:
    lines = [
        "# Memory budgets",
        "",
        f"`{report['command']}`, {report['date']}, {report['machine']['cpu']}. Live bytes of tensors beside the model "
        "and the batch, gradients included, and operations of products, over those of an ordinary step. First steps: "
        "the most of the first four, in which the model is proved and planned for. Expected: what the plan says.",
    ]
    for title, rows in report["budgets"].items():
        lines += ["", f"**{title}**", "", "| budget | later steps | expected | first steps | operations |"]
        lines.append("|---:|---:|---:|---:|---:|")
        for row in rows:
            expected = f"{row['expected']:.2f}" if "expected" in row else ""
            cells = f"{row['later']:.2f} | {expected} | {row['first']:.2f} | {row['flops']:.2f}×"
            lines.append(f"| {row['budget']} | {cells} |")
    if report["batches"]:
        sizes = report["sizes"]
        lines += ["", "## Largest batches", ""]
        lines.append(
            f"Samples of {sizes['positions']} tokens that fit under {CAP >> 30} GiB beside the model, a GPT of "
            f"{sizes['layers']} layers, width {sizes['width']}: from the peaks of one and of two samples."
        )
        names = list(next(iter(report["batches"].values())))
        lines += ["", f"| V | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
        lines += [
            f"| {vocabulary} | {' | '.join(str(found[name]) for name in names)} |"
            for vocabulary, found in report["batches"].items()
        ]
    lines += ["", "## What a step holds as it goes", "", f"![{report['picture']}]({report['picture']})"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write a report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--output", type=Path, default=files.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine.exact_float32()
    quick, device = options.quick, torch.device("cpu")
    stem = files.stem("memory-budget", device, quick=quick)
    sizes = Sizes(layers=1, width=32, vocabulary=300, positions=16, samples=2) if quick else Sizes()
    report = files.head("benchmarks.budget", ["--quick"] if quick else [], device, quick=quick)
    report |= {"sizes": vars(sizes), "budgets": {}, "batches": {}, "picture": f"{stem}.png", "peaks": {}}
    for name in ("gpt",) if quick else ("gpt", "gpt-512"):
        task = find(name, quick=quick)
        report["budgets"][task.title] = _budgets(task)
    courses = {name: _course(name, sizes) for name in COURSES}
    report["peaks"] = {name: max(course) for name, course in courses.items()}
    for vocabulary in (300,) if quick else VOCABULARIES:
        report["batches"][vocabulary] = _batches(vocabulary, sizes)
    path = files.write(options.output, stem, report, _text(report))
    title = f"V {sizes.vocabulary}, {sizes.samples} samples of {sizes.positions} tokens, {sizes.layers} layers"
    _draw(courses, path.with_name(f"{stem}.png"), title)


if __name__ == "__main__":
    main()
