"""The ledger on disk: how many private steps have begun, written before each one is applied.

Privacy:
    A crash between the write and the update leaves a step counted that was never released: the ledger may over-count,
    it never under-counts. A resumed run spends what is left of the budget, never more.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class Ledger:
    """An append-only file with one line per begun step; the number of lines is what has been spent.

    Args:
        path: The file; it is made if missing.
    """

    def __init__(self, path: Path) -> None:
        self.begun = read_ledger(path)
        self._file = path.open("ab")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def begin_step(self) -> None:
        """Count one more step, on disk, before it releases anything."""
        self.begun += 1
        # The leading newline closes a line that a crash may have torn.
        self._file.write(f"\n{self.begun}".encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def read_ledger(path: Path) -> int:
    """Count the steps that have begun.

    Args:
        path: The ledger's file.

    Returns:
        The number of steps; a torn last line counts as one.
    """
    return sum(1 for line in path.read_bytes().split(b"\n") if line.strip()) if path.exists() else 0
