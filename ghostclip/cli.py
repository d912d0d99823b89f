"""The ``ghostclip`` command: one sub-command per job, each imported when it is asked for.

Exit status: 0 done, 1 stopped by the machine (disk, memory), 2 wrong input (one line on stderr says what and where),
130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import ghostclip
from ghostclip._files import reason_of
from ghostclip._validate import did_you_mean, nearest
from ghostclip.errors import GhostClipError, OutputError

EXIT_MACHINE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_JOBS: Final = ("inspect", "plan", "plan-privacy", "epsilon", "calibrate", "ledger", "audit", "help")
# Modules with `run(given) -> exit status`. Those of `commands` declare what they take, light to import.
_COMMANDS: Final = {
    "finetune": "finetune.job",
    **{name: f"commands.{name.replace('-', '_')}" for name in _JOBS},
}
# Parameters of functions whose option has another name.
_PARAMETERS: Final = {"target_delta": "delta", "relation": "neighbours", "num_samples": "samples"}
_EXAMPLES: Final = """\
examples:
  ghostclip finetune                                      train with defaults and show where the results lie
  ghostclip inspect gpt2                                  what clipping its gradients would take
  ghostclip epsilon --noise-multiplier 1 --samples 60000 --batch-size 256 --epochs 10
  ghostclip COMMAND --help                                options and examples of a command
"""


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like those of the jobs, and name what was probably meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG_INPUT, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, map(str, action.choices or ()))
            raise

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Refuse words that no option takes.

        Args:
            unknown: The words.
        """
        known = [name for action in self._actions for name in action.option_strings]
        options = [word.split("=")[0] for word in unknown if word.startswith("-")]
        names = [name for name in (nearest(option, known) for option in options) if name is not None]
        meant = f"; did you mean {' '.join(names)}?" if names else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments after the program's name; ``None`` takes those of the process.

    Returns:
        The exit status.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    parser = _parser()
    prog = parser.prog
    try:
        parsed, unknown = parser.parse_known_args(argv)
        arguments = vars(parsed)
        parser = arguments.pop("parser")
        prog = parser.prog
        if unknown:
            parser.refuse(unknown)
        job = _COMMANDS[arguments.pop("command")]
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            # What libraries announce to those who call them is nothing that a person at a terminal can mend.
            warnings.simplefilter("ignore", FutureWarning)
            status: int = importlib.import_module(f"ghostclip.{job}").run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except GhostClipError as error:
        stopped = isinstance(error, OutputError) and error.__cause__ is not None
        if "GHOSTCLIP_TRACEBACK" in os.environ:
            raise
        return _complain(prog, _as_typed(str(error), parser), EXIT_MACHINE if stopped else EXIT_WRONG_INPUT)
    except OSError as error:
        place = "the output" if error.filename is None else error.filename
        said = f"{place}: {reason_of(error)}" if error.errno is not None else str(error) or type(error).__name__
        return _complain(prog, said, EXIT_MACHINE)
    except MemoryError as error:
        return _complain(prog, str(error) or "out of memory", EXIT_MACHINE)
    except KeyboardInterrupt:
        return _complain(prog, "interrupted", EXIT_INTERRUPTED)
    return status


def _parser() -> _OneLineParser:
    parser = _OneLineParser(
        prog="ghostclip",
        description="Differentially private training of PyTorch models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, job in _COMMANDS.items():
        module = importlib.import_module("ghostclip." + ("finetune.options" if name == "finetune" else job))
        description, _, epilog = (module.__doc__ or " ").partition("\n\n")
        command = commands.add_parser(
            name,
            help=f"{description[0].lower()}{description[1:].removesuffix('.')}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Fine-tuning tells what was given from its defaults.
            argument_default=argparse.SUPPRESS if name == "finetune" else None,
            # A misspelt option that is taken for another one is an option that is silently wrong.
            allow_abbrev=False,
        )
        if name == "finetune":
            module.add_arguments(command)
        else:
            for option, how in module.OPTIONS.items():
                command.add_argument(option, **how)
        command.set_defaults(parser=command)
    return parser


def _version() -> str:
    # From what is installed: importing torch would take a second.
    torch = importlib.metadata.version("torch")
    return f"ghostclip {ghostclip.__version__} (torch {torch}, Python {platform.python_version()})"


def _forget_stdout() -> None:
    """Let the interpreter's own flush at the end go nowhere: whoever read the output has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _as_typed(message: str, parser: argparse.ArgumentParser) -> str:
    """Name options as they are typed, ``--delta 2``, where a function says ``delta=2``."""
    options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    for name, dest in _PARAMETERS.items():
        options.setdefault(name, options.get(dest, name))
    return re.sub(
        r"(?<![\w'.-])(\w+)=", lambda found: f"{options[found[1]]} " if found[1] in options else found[0], message
    )


def _complain(prog: str, error: object, status: int) -> int:
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
