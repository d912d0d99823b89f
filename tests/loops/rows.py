"""How a row of the table is written: a function whose docstring says what its author does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.loops.loop import Loop
from tests.loops.world import World

Training = Callable[[World], None]


def row(rows: list[Loop], **options: Any) -> Callable[[Training], Training]:
    """Put a function into a table, under its own name and first line."""

    def put(run: Training) -> Training:
        about = " ".join((run.__doc__ or "").split())
        rows.append(Loop(run.__name__.strip("_").replace("_", " "), about, run, **options))
        return run

    return put
