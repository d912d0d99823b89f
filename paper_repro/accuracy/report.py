"""Table F as Markdown and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine_line
from paper_repro.published import Reference

Task = Mapping[str, Any]
Cell = Mapping[str, Any]
WEIGHTS = {"last": "last weights", "exponential": "exponential average", "tail": "average of the second half"}
COLOURS = {"last": "#8d99ae", "exponential": "#2a6f97", "tail": "#c77d2e"}
UNAMPLIFIED = ("unamplified", "bisr-4", "banded-4", "buffered-3")
CORRELATED = ("banded-2", "banded-4", "banded-8", "bisr-4", "buffered-3", "bandmf-2", "bandmf-4")
MECHANISMS = ("poisson", "balls", *CORRELATED, "unamplified")
TINY = "Few records and steps: it shows that everything runs, not what is better.\n"
HOW = """\
Every row has the same ε, batches of the same mean size and the same number of passes; the noise is what its own
accountant asks for. One set of records is trained on, a second chooses the step size (learning rate times C) by the
mean of the tuning runs, a third is reported on; seeds of tuning runs are others than those reported. Every row tries
the same step sizes, but “C tuned too” tries them with three values of C, one run each; what tuning itself would cost
in privacy is not counted. “Not private” is plain SGD with the same few steps and no clipping, which makes it unstable
at step sizes that the others bear. Averages cost nothing: they are of the same runs, with a step size chosen for
each.

Accuracy in percent ± standard error of the mean over seeds (initial weights, batches and noise; the records reported
on are the same throughout). “*”: the step size is the smallest or largest of those tried.
"""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _score(weights: Mapping[str, Any]) -> str:
    spread = weights["standard_error"]
    text = f"{100 * weights['mean']:.1f}" + (f" ± {100 * spread:.1f}" if spread is not None else "")
    return text + ("*" if weights["at_edge"] else "")


def cell_of(task: Task, row: str, epsilon: float | None) -> Cell | None:
    """Return a row's cell at an ε, if it was measured."""
    return next((cell for cell in task["cells"] if (cell["row"], cell["epsilon"]) == (row, epsilon)), None)


def _rows(task: Task) -> dict[str, str]:
    return {cell["row"]: cell["title"] for cell in task["cells"]}


def _accuracies(task: Task) -> str:
    titles = [f"ε = {epsilon:g}, {short}" for epsilon in task["epsilons"] for short in ("last", "exp.", "tail")]
    rows = []
    for row, title in _rows(task).items():
        cells = [cell_of(task, row, epsilon) or cell_of(task, row, None) for epsilon in task["epsilons"]]
        rows.append([title, *(_score(cell["weights"][name]) if cell else "" for cell in cells for name in WEIGHTS)])
    return _table(["", *titles], rows)


def _noises(task: Task) -> str:
    """σ, and what `plan_privacy` says of the noise in the parameters."""
    rows = []
    for row, title in _rows(task).items():
        cells = [cell_of(task, row, epsilon) for epsilon in task["epsilons"]]
        usual = [cell_of(task, "poisson", epsilon) for epsilon in task["epsilons"]]
        if row not in MECHANISMS or None in cells:
            continue
        shown = []
        for cell, base in zip(cells, usual, strict=True):
            ratio = f", {cell['noise'] / base['noise']:.2f}×" if cell and base else ""
            shown.append(f"σ {cell['sigma']:.3f}{ratio}" if cell else "")
        rows.append([title, *shown])
    return _table(["", *(f"ε = {epsilon:g}" for epsilon in task["epsilons"])], rows)


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """Return by how much a mean exceeds another, and the standard error of that."""
    spread = math.hypot(one["standard_error"] or 0.0, other["standard_error"] or 0.0)
    return one["mean"] - other["mean"], spread


def _verdicts(task: Task) -> str:
    """What the plan says is best, what is, and by how much: for each ε and kind of weights."""
    rows = []
    for epsilon in task["epsilons"]:
        cells = [cell for row in MECHANISMS if (cell := cell_of(task, row, epsilon))]
        usual = cell_of(task, "poisson", epsilon)
        if len(cells) < 2 or usual is None:
            continue
        planned = min(cells, key=lambda cell: cell["noise"])
        for name, said in WEIGHTS.items():
            best = max(cells, key=lambda cell, name=name: cell["weights"][name]["mean"])  # type: ignore[misc]
            gains = []
            for cell in (best, planned):
                gain, spread = difference(cell["weights"][name], usual["weights"][name])
                gains.append(
                    f"{cell['title']}, {100 * gain:+.1f} ± {100 * spread:.1f}" if cell is not usual else cell["title"]
                )
            rows.append([f"{epsilon:g}, {said}", *gains])
    titles = ["ε, weights", "most accurate, over Poisson", "least noise in parameters by `plan_privacy`, over Poisson"]
    return _table(titles, rows) if rows else ""


def _unamplified(task: Task) -> str:
    rows = []
    for row in UNAMPLIFIED:
        cells = [cell_of(task, row, epsilon) for epsilon in task["epsilons"]]
        if all(cells):
            best = [max((cell or {})["weights"].values(), key=lambda one: one["mean"]) for cell in cells]
            last = [_score((cell or {})["weights"]["last"]) for cell in cells]
            rows.append([_rows(task)[row], *(f"{one}; {_score(two)}" for one, two in zip(last, best, strict=True))])
    titles = ["", *(f"ε = {epsilon:g}: last; best weights" for epsilon in task["epsilons"])]
    return f"Same batches in every epoch, nothing amplified:\n\n{_table(titles, rows)}" if rows else ""


def _tried(task: Task) -> str:
    """Accuracy over step sizes, on the records to choose by, at the largest ε."""
    epsilon, rows = task["epsilons"][-1], []
    for row in ("poisson", "banded-4", "bisr-4", "unamplified"):
        cell = cell_of(task, row, epsilon)
        if cell:
            shown = [f"{100 * one['last']:.1f}; {100 * one['exponential']:.1f}" for one in cell["tried"]]
            rows.append([cell["title"], *shown])
    if not rows:
        return ""
    titles = [f"ε = {epsilon:g}, step size", *(f"{size:g}" for size in task["step_sizes"])]
    return f"Tuning runs: last weights; exponential average, in percent.\n\n{_table(titles, rows)}"


def _task(task: Task) -> str:
    train, chosen_by, reported_on = task["records"]
    tried = f"{len(task['step_sizes'])} step sizes ({', '.join(f'{size:g}' for size in task['step_sizes'])})"
    about = (
        f"{train:,} records to train on, {chosen_by:,} to choose by, {reported_on:,} to report on; "
        f"{task['parameters']:,} parameters; batch {task['batch_size']}, {task['epochs']} passes, "
        f"{task['steps']} steps, SGD, momentum {task['momentum']:g}, δ = {task['delta']:g}; {tried}, tuning runs for "
        f"each: {task['tuning_seeds']}. Always the commonest class: {task['commonest']:.1%}."
    )
    noises = (
        "Noise multiplier (of correlated noise: of the whole stream, so that it is the same for all coefficients), and "
        "noise in the parameters by `plan_privacy`, times that of Poisson sampling:"
    )
    luck = (
        "Of several rows that are equally good the most accurate one is chance: differences below two standard errors "
        "decide nothing."
    )
    parts = [f"## {task['title']}", about, _accuracies(task), noises, _noises(task), _verdicts(task), luck]
    return "\n\n".join(part.strip() for part in [*parts, _unamplified(task), _tried(task)] if part) + "\n"


def _allocation(found: Sequence[Mapping[str, float]]) -> str:
    rows = [
        [
            f"T = {one['steps']}, k = {one['rounds']}, ε = {one['epsilon']:g}",
            f"{one['poisson']:.4f}",
            f"{one['balls']:.4f}",
            f"{100 * (one['balls'] / one['poisson'] - 1):+.1f} %",
        ]
        for one in found
    ]
    said = (
        "A record takes part in k of T steps: with probability k/T in each (Poisson), or in exactly one of the T/k "
        "steps of each of k passes (balls in bins). The least noise multiplier for ε at δ = 1e-5, by certified "
        "upper bounds of both."
    )
    titles = ["", "σ, Poisson", "σ, balls in bins", "difference"]
    return f"## Noise of balls in bins beside Poisson sampling\n\n{said}\n\n{_table(titles, rows)}"


def _spent(report: Mapping[str, Any]) -> str:
    """Say what the engine reports at the end, as a part of what was asked for."""
    shares = [
        cell["epsilon_spent"] / cell["epsilon"]
        for task in report["tasks"]
        for cell in task["cells"]
        if "epsilon_spent" in cell
    ]
    return f"ε that the engine reports after a run: {min(shares):.1%} to {max(shares):.1%} of it. " if shares else ""


def markdown(report: Mapping[str, Any]) -> str:
    """Return the whole report, ours first, then what was published."""
    parts = [
        "# Table F: accuracy of sampling and noise mechanisms at equal ε\n",
        f"`{report['command']}` on {machine_line(report)}\n",
        TINY if report["size"] == "tiny" else "",
        f"{HOW}{_spent(report)}{report['seeds']} seeds.\n",
        *(f"{note}\n" for note in report["notes"]),
        *(_task(task) for task in report["tasks"]),
        _allocation(report["allocation"]),
        "## Published, on other data\n",
        *(Reference(**reference).markdown() for reference in report["references"]),
    ]
    return "\n".join(part for part in parts if part)


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each task and ε: accuracy of each row with its standard error.

    Args:
        report: A report as read from its file.
        path: The PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = report["tasks"]
    most = max(len(task["epsilons"]) for task in tasks)
    figure = pyplot.figure(figsize=(13, 3.6 * len(tasks)), layout="constrained")
    for part, task in zip(figure.subfigures(len(tasks), 1, squeeze=False).flat, tasks, strict=True):
        part.suptitle(task["title"], fontsize=9)
        for number, (axes, epsilon) in enumerate(
            zip(part.subplots(1, most, squeeze=False).flat, task["epsilons"], strict=False)
        ):
            _panel(axes, task, epsilon)
            axes.set_title(f"ε = {epsilon:g}: test accuracy, %", fontsize=8)
            if number:
                axes.set_yticklabels([])
    # Beside the panels: on them it would hide points.
    part.legend(
        *part.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _panel(axes: Any, task: Task, epsilon: float) -> None:
    rows = {row: title for row, title in _rows(task).items() if cell_of(task, row, epsilon)}
    for offset, (name, said) in zip((-0.2, 0.0, 0.2), WEIGHTS.items(), strict=True):
        found = [(cell_of(task, row, epsilon) or {})["weights"][name] for row in rows]
        axes.errorbar(
            [100 * one["mean"] for one in found],
            [place + offset for place in range(len(rows))],
            xerr=[100 * (one["standard_error"] or 0.0) for one in found],
            fmt="o",
            ms=3,
            capsize=2,
            color=COLOURS[name],
            label=said,
        )
    axes.set_yticks(range(len(rows)), list(rows.values()), fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
