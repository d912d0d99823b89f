"""A process that measures one checkout of this repository, so that several can take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# Begins a program whose steady steps are to be steady: with checks at the powers of four, and at no others.
PREDICTABLE: Final = """
import ghostclip
try:
    from ghostclip.evidence import unchecked
    unchecked.forwards_between = lambda number, numbers: 3 * number
except ImportError:
    pass
"""


class TreeWorker:
    """Answers questions, a line each, about the code of one checkout.

    Args:
        tree: The checkout.
        program: Python code that reads questions from its standard input and prints an answer in JSON for each.
        arguments: Of the program.
        environment: Variables of its own.
        under: A command that runs Python, if it is not run by itself.
    """

    def __init__(
        self,
        tree: Path,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        under: Sequence[str] = (),
    ) -> None:
        variables = {**os.environ, **environment, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [*under, sys.executable, "-c", program, *arguments],
            cwd=tree,
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, question: str) -> Any:
        """Ask one thing.

        Args:
            question: A line.

        Returns:
            The answer.

        Raises:
            RuntimeError: The process ended.
        """
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
