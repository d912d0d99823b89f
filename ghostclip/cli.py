"""The ``ghostclip`` command: one sub-command per job, each imported when it is asked for.

Exit status: 0 done, 1 stopped by the machine (disk, memory), 2 wrong input (one line on stderr says what and where),
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn, TextIO

from ghostclip.errors import GhostClipError

EXIT_MACHINE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130

# Name: what it does, the module with `add_arguments(parser)`, the module with `run(given) -> exit status`. Both are
# light to import until `run` is called; `given` holds the options that were given.
_COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "finetune": (
        "train a causal transformer on text with differential privacy",
        "finetune.arguments",
        "finetune.job",
    ),
    "inspect": (
        "say how a model's gradients would be clipped, what that costs and what is refused",
        "commands.inspect",
        "commands.inspect",
    ),
    "epsilon": ("bound epsilon of a private training", "commands.epsilon", "commands.epsilon"),
    "calibrate": (
        "find the noise, sample rate or number of steps that keeps a privacy budget",
        "commands.calibrate",
        "commands.calibrate",
    ),
    "audit": ("test a claimed epsilon with the scores of an attack", "commands.audit", "commands.audit"),
}


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like those of the jobs."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG_INPUT, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments after the program's name; ``None`` takes those of the process.

    Returns:
        The exit status.
    """
    parsed, unknown = _parser().parse_known_args(argv)
    arguments = vars(parsed)
    parser: argparse.ArgumentParser = arguments.pop("parser")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    job: Callable[[dict[str, object]], int] = arguments.pop("job")
    del arguments["command"]
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return job(arguments)
    except GhostClipError as error:
        return _complain(parser.prog, error, EXIT_WRONG_INPUT)
    except (OSError, MemoryError) as error:
        return _complain(parser.prog, error, EXIT_MACHINE)
    except KeyboardInterrupt:
        return _complain(parser.prog, "interrupted", EXIT_INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="ghostclip", description="Differentially private training of PyTorch models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, arguments, job) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            argument_default=argparse.SUPPRESS,
            # A misspelt option that is taken for another one is an option that is silently wrong.
            allow_abbrev=False,
        )
        importlib.import_module(f"ghostclip.{arguments}").add_arguments(command)
        command.set_defaults(job=partial(_run, job), parser=command)
    return parser


def _run(module: str, given: dict[str, object]) -> int:
    return importlib.import_module(f"ghostclip.{module}").run(given)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _complain(prog: str, error: object, status: int) -> int:
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
