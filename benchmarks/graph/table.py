"""Architectures of transformers under the strategy "graph": exact as one graph, or eager and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import ghostclip
from tests.architectures.known import ALL
from tests.architectures.measure import reference
from tests.architectures.table import Architecture
from tests.exactness.runs import gradients, relative_error


def row(found: Architecture) -> dict[str, Any]:
    """Try one architecture in float64, its graph run operation by operation.

    Args:
        found: The architecture.

    Returns:
        Plain values for JSON: error of the clipped sum and of the norms against one sample at a time, or why it is
        eager.
    """
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
        "error": relative_error(gradients(model), want.clipped),
        "norm_error": ((norms_B - want.norms_B).abs() / want.norms_B).max().item(),
    }


def tried(found: Architecture) -> dict[str, Any]:
    """Try one architecture, whatever it raises.

    Args:
        found: The architecture.

    Returns:
        As `row`, or what was raised.
    """
    try:
        return row(found)
    except Exception as problem:  # noqa: BLE001 - whatever happened to it is its row
        return {"name": found.name, "family": found.family, "failed": f"{type(problem).__name__}: {problem}"[:200]}


def names() -> list[Architecture]:
    """Return all architectures of the table."""
    return ALL


def text(report: dict[str, Any]) -> str:
    """Return a report as Markdown.

    Args:
        report: What was found.

    Returns:
        The page.
    """
    rows = report["rows"]
    kinds = Counter(_kind(one) for one in rows)
    largest = max((max(one["error"], one["norm_error"]) for one in rows if "error" in one), default=0.0)
    lines = [
        "# Architectures as one graph",
        "",
        f"`{report['command']}`, {report['date']}, torch {report['machine']['versions']['torch']}, transformers "
        f"{report['machine']['versions']['transformers']}: tiny models in float64, clipped sums and norms against one "
        f"sample at a time. {kinds['graph']} of {len(rows)} are one graph (largest relative error {largest:.0e}), "
        f"{kinds['eager']} are computed eagerly for the reason beside them, {kinds['refused']} are refused by the "
        f"eager engine as well, {kinds['failed']} failed in this run.",
        "",
        "| architecture | family | | reason |",
        "|---|---|---|---|",
    ]
    for one in rows:
        reason = one.get("eager") or one.get("refused") or one.get("failed") or ""
        lines.append(f"| {one['name']} | {one['family']} | {_kind(one)} | {_cell(reason)} |")
    return "\n".join(lines) + "\n"


def _kind(one: dict[str, Any]) -> str:
    return next((kind for kind in ("eager", "refused", "failed") if kind in one), "graph")


def _cell(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "/")[:200]
