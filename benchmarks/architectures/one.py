"""One architecture, in a process of its own: what ghostclip and Opacus do on it."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection

import torch

from benchmarks.architectures import opacus
from ghostclip.errors import GhostClipError
from tests.architectures.known import ALL
from tests.architectures.measure import measure, none, reference
from tests.cases import Case


def send_row(name: str, to: Connection) -> None:
    """Measure one architecture with the lowest priority, and send its row."""
    if hasattr(os, "nice"):
        os.nice(19)
    try:
        to.send(row(name))
    except Exception as problem:  # noqa: BLE001 - whatever happened to it is its row
        to.send({"failed": f"{type(problem).__name__}: {problem}"[:300]})


def row(name: str) -> dict[str, object]:
    """Measure one architecture."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = next(row for row in ALL if row.name == name)
    case = found.case
    model = case.model(torch.float64)
    about: dict[str, object] = {
        "name": name,
        "family": found.family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
    }
    want = none() if case.refused else reference(case)
    about |= _ours(case, want)
    if "refused" in about:
        return {**about, "reason": found.reason}
    return {**about, "opacus": {way: opacus.compare(case, way, want) for way in opacus.WAYS}}


def _ours(case: Case, want: object) -> dict[str, object]:
    started = time.process_time()
    try:
        done = measure(case, "bookkeeping", want)
    except GhostClipError as refusal:
        return {"refused": f"{type(refusal).__name__}: {refusal}", "seconds": time.process_time() - started}
    forms: Counter[str] = Counter()
    for covered in done.coverage:
        forms.update({part.partition(": ")[2] or part for part in covered.handled.split("; ")})
    slow = sorted({covered.handled for covered in done.coverage if "one gradient per sample" in covered.handled})
    return {
        "error": done.error,
        "norm_error": done.norm_error,
        "moved": done.moved,
        "seconds": time.process_time() - started,
        "forms": dict(forms),
        "one_gradient_a_sample": slow,
    }
