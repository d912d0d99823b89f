"""A process that measures one checkout of this repository, so that several can take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

# Begins a program whose steady steps are to be steady: with checks at the powers of four, and at no others.
PREDICTABLE: Final = """
import ghostclip
try:
    from ghostclip.checks import unchecked
    unchecked.forwards_between = lambda number, numbers: 3 * number
except ImportError:
    pass
"""


# One thread, and a heap that is kept, so that no step pays for pages that another has given back.
_KEPT_HEAP: Final = {
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "5",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


class TreeWorker:
    """Runs a program on the code of one checkout, which answers each line of questions with a line of JSON."""

    def __init__(
        self,
        tree: Path,
        program: str,
        arguments: Sequence[str],
        under: Sequence[str] = (),
    ) -> None:
        variables = {**os.environ, **_KEPT_HEAP, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [*under, sys.executable, "-c", program, *arguments],
            cwd=tree,
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, question: str) -> Any:
        """Ask one thing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            message = "a worker ended; its error is above"
            raise RuntimeError(message)
        return json.loads(answer)

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def commit_of(tree: Path) -> str:
    """What git calls a checkout's commit; the folder's name without git."""
    asked = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or tree.name
