"""The ``ghostclip`` command: one sub-command per job, which imports what it needs when it is asked for.

Exit status: 0 done, 1 stopped by the machine (disk, memory), 2 wrong input (one line on stderr says what and where),
130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import ghostclip
from ghostclip import commands, errors
from ghostclip import finetune as finetuning
from ghostclip._files import reason_of
from ghostclip._validate import did_you_mean, nearest
from ghostclip.errors import GhostClipError, InvalidOptionError, OutputError
from ghostclip.terminal import Options

EXIT_MACHINE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_HELP: Final[Options] = {
    "error": {"metavar": "ERROR", "nargs": "?", "help": "name of an error or warning (default: all of them)"}
}
_ERRORS: Final = Path(errors.__file__).with_name("ERRORS.md")
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
        """Refuse words that no option takes."""
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
        run = _COMMANDS[arguments.pop("command")][0]
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            # What libraries announce to those who call them is nothing that a person at a terminal can mend.
            warnings.simplefilter("ignore", FutureWarning)
            status = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter's own flush at the end goes nowhere: whoever read the output has gone.
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except GhostClipError as error:
        stopped = isinstance(error, OutputError) and error.__cause__ is not None
        if "GHOSTCLIP_TRACEBACK" in os.environ:
            raise
        return _complain(prog, _as_typed(str(error), parser), EXIT_MACHINE if stopped else EXIT_WRONG_INPUT)
    except OSError as error:
        filename = "the output" if error.filename is None else error.filename
        said = f"{filename}: {reason_of(error)}" if error.errno is not None else str(error) or type(error).__name__
        return _complain(prog, said, EXIT_MACHINE)
    except MemoryError as error:
        return _complain(prog, str(error) or "out of memory", EXIT_MACHINE)
    except KeyboardInterrupt:
        return _complain(prog, "interrupted", EXIT_INTERRUPTED)
    return status


def _parser() -> _OneLineParser:
    # A misspelt option that is taken for another one is an option that is silently wrong.
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    description = "Differentially private training of PyTorch models."
    parser = _OneLineParser(prog="ghostclip", description=description, epilog=_EXAMPLES, **form)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, options) in _COMMANDS.items():
        text = finetuning.__doc__ if options is None else inspect.getdoc(run)
        description, _, epilog = (text or " ").partition("\n\n")
        command = commands.add_parser(
            name,
            help=f"{description[0].lower()}{description[1:].removesuffix('.')}",
            description=description,
            epilog=epilog,
            # Fine-tuning tells what was given from its defaults.
            argument_default=argparse.SUPPRESS if options is None else None,
            **form,
        )
        if options is None:
            finetuning.add_arguments(command)
        else:
            for option, how in options.items():
                command.add_argument(option, **how)
        command.set_defaults(parser=command)
    return parser


def _finetune(args: dict[str, Any]) -> int:
    from ghostclip.finetune import job

    return job.run(args)


def _help(args: dict[str, Any]) -> int:
    """Explain an error of ghostclip: what causes it and what to do.

    examples:
      ghostclip help SampleMixingError
          the entry of one error
      ghostclip help
          all entries
    """
    page = re.sub(r"\[([^\]]+)\]\((?:\.\./)?([^)]+)\)", r"\1 (\2)", _ERRORS.read_text(encoding="utf-8"))
    entries = dict(re.findall(r"^## (\w+)\n\n(.*?)\s*(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
    name = args["error"]
    if name is None:
        print(page, end="")
        return 0
    known = {entry.lower(): entry for entry in entries}
    error_name = known.get(name.lower())
    if error_name is None:
        raise InvalidOptionError(
            f"{name}: no error of ghostclip{did_you_mean(name, entries, otherwise='.')} `ghostclip help` lists them; "
            "`ghostclip COMMAND --help` explains a command."
        )
    print(f"{error_name}: {inspect.getdoc(getattr(errors, error_name))}\n\n{entries[error_name]}")
    return 0


_COMMANDS: Final[dict[str, tuple[Callable[[dict[str, Any]], int], Options | None]]] = {
    "finetune": (_finetune, None),
    "inspect": (commands.run_inspect, commands.INSPECT),
    "plan": (commands.run_plan, commands.PLAN),
    "plan-privacy": (commands.run_plan_privacy, commands.PLAN_PRIVACY),
    "epsilon": (commands.run_epsilon, commands.EPSILON),
    "calibrate": (commands.run_calibrate, commands.CALIBRATE),
    "ledger": (commands.run_ledger, commands.LEDGER),
    "audit": (commands.run_audit, commands.AUDIT),
    "help": (_help, _HELP),
}
"""What runs a command, and the table of its options; fine-tuning declares its own."""


def _version() -> str:
    # From what is installed: importing torch would take a second.
    torch = importlib.metadata.version("torch")
    return f"ghostclip {ghostclip.__version__} (torch {torch}, Python {platform.python_version()})"


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _as_typed(message: str, parser: argparse.ArgumentParser) -> str:
    """Name options as they are typed, ``--delta 2``, where a function says ``delta=2``."""
    options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    for name, dest in _PARAMETERS.items():
        options.setdefault(name, options.get(dest, name))
    return re.sub(
        r"(?<![\w'.-])(\w+)=", lambda match: f"{options[match[1]]} " if match[1] in options else match[0], message
    )


def _complain(prog: str, error: object, status: int) -> int:
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
