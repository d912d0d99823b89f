"""Architectures of transformers under the strategy "graph": exact as one graph, or eager and why."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch

import ghostclip
from tests.architectures.known import ALL
from tests.architectures.measure import reference
from tests.architectures.table import Architecture
from tests.cases.table import Case
from tests.exactness.runs import gradients, relative_error

WAYS: Final = ("ordinary", "book-keeping", "graph")
# Why architectures are eager, in words, by what their reasons hold.
CAUSES: Final = {
    "samples mix": "a value is summed over the batch, or follows it",
    "follows B": "a value is summed over the batch, or follows it",
    "is not known to be linear": "an operation on sums over samples that is not known to be linear",
    "is no sum over samples": "a gradient that no factor is known for",
    "how the": "how rows of samples lie is not known",
    "depends on data": "shapes or numbers that depend on data",
    "data-dependent": "shapes or numbers that depend on data",
    "branches on data": "shapes or numbers that depend on data",
    "with one sample more": "other operations with one sample more",
    "generator": "random numbers that are not torch's",
    "cannot be traced": "torch cannot trace it",
    "does not run": "its graph does not run",
    "too large": "weights of each token's experts are too large",
}


def row(found: Architecture, rounds: int) -> dict[str, Any]:
    """Try one architecture in float64, its graph run operation by operation, and compile it."""
    case, about = found.case, {"name": found.name, "family": found.family}
    if case.refused:
        return {**about, "refused": found.reason}
    model, want = case.model(torch.float64), reference(case)
    clipper = ghostclip.GhostClipper(
        model, max_grad_norm=want.max_grad_norm, strategy="graph", batch_first=case.batch_first
    )
    step = ghostclip.GraphStep(clipper, case.losses, options=ghostclip.GraphOptions(backend="aten"))
    with case.numerics(torch.float64):
        step(case.data(torch.float64))
        if step.graphs and step.graphs[0].verified:
            clipper.reset()
            step(case.data(torch.float64))
    if step.reasons:
        return {**about, "eager": next(iter(step.reasons))}
    norms_B = clipper.per_sample_norms.double()
    return {
        **about,
        **(_timed(case, rounds) if rounds else {}),
        "error": relative_error(gradients(model), want.clipped),
        "norm_error": ((norms_B - want.norms_B).abs() / want.norms_B).max().item(),
    }


def _timed(case: Case, rounds: int) -> dict[str, Any]:
    """Return milliseconds of CPU time of a step in three ways, which take turns; nothing where it does not compile."""
    models = {way: case.model(torch.float32) for way in WAYS}
    data = case.data(torch.float32)
    clippers = {
        way: ghostclip.GhostClipper(models[way], max_grad_norm=1.0, strategy=strategy, batch_first=case.batch_first)
        for way, strategy in (("book-keeping", "bookkeeping"), ("graph", "graph"))
    }
    step = ghostclip.GraphStep(clippers["graph"], case.losses, options=ghostclip.GraphOptions(cache=False))
    runs: dict[str, Callable[[], Any]] = {
        "ordinary": lambda: case.losses(models["ordinary"], data).sum().backward(),
        "book-keeping": lambda: clippers["book-keeping"].backward(case.losses(models["book-keeping"], data)),
        "graph": lambda: step(data),
    }
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with case.numerics(torch.float32):
        for _ in range(3 + rounds):
            for way, run in runs.items():
                models[way].zero_grad()
                if way in clippers:
                    clippers[way].reset()
                begun = time.process_time()
                run()
                taken[way].append(1000 * (time.process_time() - begun))
    if step.reasons:
        return {"uncompiled": next(iter(step.reasons))}
    return {"milliseconds": {way: statistics.median(own[3:]) for way, own in taken.items()}}


def tried(found: Architecture, *, rounds: int = 0) -> dict[str, Any]:
    """Try one architecture, whatever it raises."""
    try:
        return row(found, rounds)
    except Exception as problem:  # noqa: BLE001 - whatever happened to it is its row
        return {"name": found.name, "family": found.family, "failed": f"{type(problem).__name__}: {problem}"[:200]}


def names() -> list[Architecture]:
    """Return all architectures of the table."""
    return ALL


def text(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    rows = report["rows"]
    kinds = Counter(_kind(one) for one in rows)
    timed = sum("milliseconds" in one for one in rows)
    largest = max((max(one["error"], one["norm_error"]) for one in rows if "error" in one), default=0.0)
    lines = [
        "# Architectures as one graph",
        "",
        f"`{report['command']}`, {report['date']}, torch {report['machine']['versions']['torch']}, transformers "
        f"{report['machine']['versions']['transformers']}: tiny models in float64, clipped sums and norms against one "
        f"sample at a time. {kinds['graph']} of {len(rows)} are one graph (largest relative error {largest:.0e}), "
        f"{kinds['eager']} are computed eagerly for the reason beside them, {kinds['refused']} are refused by the "
        f"eager engine as well, {kinds['failed']} failed in this run.",
        *(f"Measured anew: {anew}." for anew in report.get("anew", [])),
        "",
        "Times: CPU time of a compiled step in float32, one thread, over an ordinary eager step of the same model, and "
        f"in brackets that of book-keeping; {timed} were compiled and timed, on {report['machine']['cpu']}. Models as "
        "small as these cost what calling operations costs: what is saved is Python.",
        "",
        *_by_cause(rows),
        "",
        "| architecture | family | | time | reason |",
        "|---|---|---|---:|---|",
    ]
    for one in rows:
        reason = one.get("eager") or one.get("refused") or one.get("failed") or one.get("uncompiled") or ""
        lines.append(f"| {one['name']} | {one['family']} | {_kind(one)} | {_times(one)} | {_cell(reason)} |")
    return "\n".join(lines) + "\n"


def _by_cause(rows: list[dict[str, Any]]) -> list[str]:
    eager = [one for one in rows if "eager" in one]
    found: dict[str, list[str]] = {}
    for one in eager:
        cause = next((words for part, words in CAUSES.items() if part in one["eager"]), "another reason")
        found.setdefault(cause, []).append(one["name"])
    lines = ["| why it is eager | architectures | for example |", "|---|---:|---|"]
    for cause, names in sorted(found.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {cause} | {len(names)} | {', '.join(names[:3])} |")
    return lines


def _kind(one: dict[str, Any]) -> str:
    return next((kind for kind in ("eager", "refused", "failed") if kind in one), "graph")


def _times(one: dict[str, Any]) -> str:
    own = one.get("milliseconds")
    return f"{own['graph'] / own['ordinary']:.2f} ({own['book-keeping'] / own['ordinary']:.2f})" if own else ""


def _cell(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "/")[:200]
