"""Memory and operations under memory budgets, of first steps, and in the course of one: `python -m benchmarks.budget`.

Live bytes, counted operation by operation, gradients included and the model's own tensors not: the same on every
machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import files, machine
from benchmarks.flops import counter
from benchmarks.head.ways import Sizes, maker
from benchmarks.live import course_of, peak_of
from benchmarks.models import GPT
from benchmarks.tasks import Task, find, per_sample_losses
from ghostclip import GhostClipper

MEBIBYTE = 2**20
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
# Those of a model whose factors are smaller than its gradients, each without and with factors in 16 bits.
ROUNDED = (0.9, 0.8, 0.7)
WIDTH, POSITIONS, VOCABULARY, SAMPLES = 192, 48, 200, 8
# Until a model was proved and planned for.
STEPS = 4
# The strategy, and whether the loss is one number.
FIRST = {
    "book-keeping": ("bookkeeping", False),
    "book-keeping, scalar loss": ("bookkeeping", True),
    "two backwards": ("ghost", False),
    "hooks": ("hooks", False),
}
COURSES = (
    "ordinary",
    "ordinary, torch's linear_cross_entropy",
    "book-keeping, logits",
    "book-keeping, no logits",
)


def _budgets(task: Task, ways: Sequence[tuple[float, torch.dtype | None]]) -> list[dict[str, Any]]:
    """Return peaks and operations under budgets, over those of an ordinary step; the first one's sum is exact."""
    device = torch.device("cpu")
    model, batch = task.model(device), task.batch(device)
    beside = [*model.parameters(), *batch]

    def ordinary() -> None:
        model.zero_grad(set_to_none=True)
        per_sample_losses(model, batch).mean().backward()

    ordinary()
    peak, flops = peak_of(ordinary, beside=beside), _flops(ordinary)
    rows: list[dict[str, Any]] = []
    exact: Tensor | None = None
    for budget, dtype in ways:
        with GhostClipper(model, max_grad_norm=1.0, memory_budget=budget, factor_dtype=dtype) as clipper:

            def private(clipper: GhostClipper = clipper) -> None:
                model.zero_grad(set_to_none=True)
                clipper.backward(per_sample_losses(model, batch))

            first = max(peak_of(private, beside=beside) for _ in range(STEPS))
            row = {"budget": budget, "first": first / peak, "later": peak_of(private, beside=beside) / peak}
            rows.append(row | {"flops": _flops(private) / flops})
            coverage, total = clipper.coverage(), torch.cat([p.grad.flatten() for p in model.parameters()])
            if coverage.expected_share is not None:
                rows[-1]["expected"] = coverage.expected_share
            exact = total if exact is None else exact
            if dtype is not None:
                rows[-1]["rounded"] = sum("bfloat16" in row.plan for row in coverage)
                rows[-1]["error"] = float((total - exact).norm() / exact.norm())
    return rows


def _first_steps(task: Task) -> dict[str, list[dict[str, float]]]:
    """Return forwards, operations and peaks of the first steps of some ways, the last two over an ordinary step's."""
    device = torch.device("cpu")
    model, batch = task.model(device), task.batch(device)
    beside, samples, found = [*model.parameters(), *batch], list[int](), dict[str, list[dict[str, float]]]()
    forward = model.forward

    def seen(inputs: Tensor) -> Tensor:
        samples.append(len(inputs))
        output: Tensor = forward(inputs)
        return output

    def ordinary() -> None:
        per_sample_losses(model, batch).mean().backward()

    def counted(step: Callable[[], None]) -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        samples.clear()
        with counter() as operations:
            peak = peak_of(step, beside=beside)
        flops = operations.get_total_flops()
        return {"forwards": sum(samples) / task.batch_size, "flops": flops, "bytes": peak}

    ordinary()
    model.forward = seen
    base = counted(ordinary)
    for name, (strategy, scalar) in FIRST.items():
        with GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper:

            def private(clipper: GhostClipper = clipper, *, scalar: bool = scalar) -> None:
                losses_B = per_sample_losses(model, batch)
                clipper.backward(losses_B.mean() if scalar else losses_B)

            steps = [counted(private) for _ in range(STEPS)]
            found[name] = [step | {of: step[of] / base[of] for of in ("flops", "bytes")} for step in steps]
    return found


def _short() -> Task:
    """Return a task of few positions for the width of its layers."""
    title = f"GPT, 4 layers, d {WIDTH}, 4 heads, T {POSITIONS}, V {VOCABULARY}, B {SAMPLES}"

    def model() -> GPT:
        return GPT(vocabulary=VOCABULARY, width=WIDTH, heads=4, layers=4, positions=POSITIONS)

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        ids_BT = torch.randint(VOCABULARY, (samples, POSITIONS))
        return ids_BT, ids_BT.roll(-1, 1)

    return Task("gpt-short", title, SAMPLES, model, batch)


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


def _draw(courses: dict[str, Sequence[int]], path: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    # Told apart without colours by how they are drawn, too.
    styles = (("#8d99ae", "-"), ("#222222", ":"), ("#D55E00", "-"), ("#0072B2", "-"))
    for (name, course), (colour, line) in zip(courses.items(), styles, strict=True):
        share = [number / max(1, len(course) - 1) for number in range(len(course))]
        panel.plot(
            share, [taken / MEBIBYTE for taken in course], label=name, linewidth=1.6, color=colour, linestyle=line
        )
    panel.set_xlabel("operations of a step, forward and backward, from first to last")
    panel.set_ylabel("MiB of live tensors beside the model")
    panel.set_title(title, fontsize=10)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _head(report: dict[str, Any], title: str, said: str) -> list[str]:
    about = f"`{report['command']}`, {report['date']}, {report['machine']['cpu']}."
    return [
        f"# {title}",
        "",
        f"{about} Live bytes of tensors beside the model and the batch, gradients included. {said}",
    ]


def _of_budgets(report: dict[str, Any]) -> str:
    said = (
        "Memory and operations of products over those of an ordinary step. First steps: the most of the first four, in "
        "which the model is proved and planned for. Expected: what the plan says."
    )
    rounded = any("rounded" in row for rows in report["budgets"].values() for row in rows)
    if rounded:
        said += (
            " Rounded: layers whose factors `factor_dtype=torch.bfloat16` let the plan hold in 16 bits. Error: of the "
            "clipped sum, over the exact one; C = 1."
        )
    lines = _head(report, "Factors in 16 bits" if rounded else "Memory budgets", said)
    for title, rows in report["budgets"].items():
        columns = ["budget", "later steps", "expected", "first steps", "operations"]
        columns += ["rounded", "error of the sum"] * rounded
        lines += ["", f"**{title}**", "", f"| {' | '.join(columns)} |", "|---:" * len(columns) + "|"]
        for row in rows:
            expected = f"{row['expected']:.2f}" if "expected" in row else ""
            cells = f"{row['later']:.2f} | {expected} | {row['first']:.2f} | {row['flops']:.2f}×"
            more = f" {row['rounded']} | {row['error']:.1e} |" if "rounded" in row else " | |" * rounded
            lines.append(f"| {row['budget']} | {cells} |{more}")
    return "\n".join(lines) + "\n"


def _of_courses(report: dict[str, Any]) -> str:
    sizes = report["sizes"]
    said = f"V {sizes['vocabulary']}, {sizes['layers']} layers, width {sizes['width']}, {sizes['samples']} samples."
    lines = _head(report, "What a step holds as it goes", said)
    lengths = list(report["courses"])
    lines += [
        "",
        f"| most, MiB | {' | '.join(f'T {length}' for length in lengths)} |",
        f"|---|{'---:|' * len(lengths)}",
    ]
    for name in COURSES:
        cells = [f"{report['courses'][length]['peaks'][name] / MEBIBYTE:.0f}" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    pictures = [report["courses"][length]["picture"] for length in lengths]
    return "\n".join([*lines, *(line for picture in pictures for line in ("", f"![{picture}]({picture})"))]) + "\n"


def _of_first_steps(report: dict[str, Any]) -> str:
    said = (
        "The 1st step proves the model, and so do the 4th, the 16th and so on; the 2nd and all others are plain. "
        "Forwards: of whole batches, the model's own among them. Operations of products and memory: over those of an "
        "ordinary step."
    )
    lines = _head(report, "First steps", said)
    for title, rows in report["steps"].items():
        lines += ["", f"**{title}**", "", "| | forwards: 1st, 2nd, 4th | operations | memory |", "|---|---:|---:|---:|"]
        for name, steps in rows.items():
            cells = [
                ", ".join(f"{steps[number][of]:.{digits}f}" for number in (0, 1, 3))
                for of, digits in (("forwards", 1), ("flops", 2), ("bytes", 2))
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _measured(part: str, report: dict[str, Any], folder: Path, *, quick: bool) -> None:
    """Measure one part; what there is so far is written as it comes."""
    stem = files.stem(f"memory-{part}", torch.device("cpu"), quick=quick)
    if part == "rounding":
        ways = [(1.0, None), *((budget, dtype) for budget in ROUNDED for dtype in (None, torch.bfloat16))]
        task = _short()
        report["budgets"] = {task.title: _budgets(task, ways)}
        files.write(folder, stem, report, _of_budgets(report))
        return
    if part == "budgets":
        report["budgets"] = {}
        for name in ("gpt",) if quick else ("gpt-512",):
            task = find(name, quick=quick)
            report["budgets"][task.title] = _budgets(task, [(budget, None) for budget in BUDGETS])
            files.write(folder, stem, report, _of_budgets(report))
        return
    if part == "steps":
        report["steps"] = {}
        for name in ("cnn", "gpt") if quick else ("cnn-64", "cnn", "block-T128-B8"):
            task = find(name, quick=quick)
            report["steps"][task.title] = _first_steps(task)
            files.write(folder, stem, report, _of_first_steps(report))
        return
    small = Sizes(layers=1, width=32, vocabulary=300)
    report |= {"sizes": asdict(small if quick else Sizes()), "courses": {}}
    for length in (16, 32) if quick else (64, 512):
        sizes = replace(small if quick else Sizes(), positions=length)
        courses = {name: _course(name, sizes) for name in COURSES}
        picture = f"{stem}-T{length}.png"
        peaks = {name: max(course) for name, course in courses.items()}
        report["courses"][str(length)] = {"peaks": peaks, "picture": picture}
        title = f"V {sizes.vocabulary}, {sizes.samples} samples of {length} tokens, {sizes.layers} layers"
        _draw(courses, folder / picture, title)
    files.write(folder, stem, report, _of_courses(report))


def main() -> None:
    """Measure, and write a report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("part", choices=("budgets", "rounding", "courses", "steps"))
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--output", type=Path, default=files.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine.exact_float32()
    arguments = [options.part, *(["--quick"] if options.quick else [])]
    report = files.head("benchmarks.budget", arguments, torch.device("cpu"), quick=options.quick)
    _measured(options.part, report, options.output, quick=options.quick)


if __name__ == "__main__":
    main()
