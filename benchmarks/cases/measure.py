"""Run one case of the tests' table in every strategy."""

from __future__ import annotations

import time

import torch

from ghostclip.errors import GhostClipError
from tests.cases import Case
from tests.exactness.runs import STRATEGIES, engine, expected, moved, relative_error, run

Row = dict[str, object]


def measure(case: Case) -> Row:
    """Measure a case."""
    begun = time.process_time()
    dtype = torch.float64 if torch.float64 in case.dtypes else case.dtypes[0]
    row: Row = {"name": case.name, "dtype": str(dtype)[6:], "forms": _forms(case, dtype)}
    try:
        row["errors"] = {strategy: _error(case, strategy, dtype) for strategy in STRATEGIES}
        if "random" not in case.tags:
            make = engine("bookkeeping", batch_first=case.batch_first)
            row["sensitivity"] = max(moved(case, make, dtype))
    except GhostClipError as error:
        row["refused"] = " ".join(str(error).split())
    row["cpu_s"] = round(time.process_time() - begun, 2)
    return row


def _error(case: Case, strategy: str, dtype: torch.dtype) -> float:
    outcome = run(case, engine(strategy, batch_first=case.batch_first), dtype)
    return relative_error(outcome.clipped, expected(case.name).clipped)


def _forms(case: Case, dtype: torch.dtype) -> list[str]:
    """How the parameters of a case are handled, each form once."""
    model = case.model(dtype)
    clipper = engine("bookkeeping", batch_first=case.batch_first)(model, 1.0)
    try:
        with case.numerics(dtype):
            clipper.backward(case.losses(model, case.data(dtype)))
    except GhostClipError:
        return []
    return sorted({row.handled for row in clipper.coverage()})
