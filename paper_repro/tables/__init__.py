"""One module for each table; `load` finds them by letter."""

from __future__ import annotations

from importlib import import_module

from paper_repro.cases import Size, Table

LETTERS = ("A", "B", "C", "D", "E")


def load(letter: str, size: Size) -> Table:
    """Describe a table.

    Args:
        letter: One of `LETTERS`.
        size: How large the models and batches are.

    Returns:
        The table.
    """
    return import_module(f"paper_repro.tables.{letter.lower()}").table(size)
