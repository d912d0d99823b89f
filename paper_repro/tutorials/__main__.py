"""Run tutorials and write their pages into docs/tutorials: `python -m paper_repro.tutorials [NAME ...]`."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import harness
from benchmarks.harness import machine_line
from paper_repro.tutorials import NAMES
from tests.integrations import timm_stand_in as stand_in

HERE: Final = Path(__file__).resolve().parent
PAGES: Final = HERE.parents[1] / "docs" / "tutorials"
OUTPUT: Final = re.compile(r"```text\n.*?```\n\n|\n\*Run on .*", flags=re.DOTALL)
Part = tuple[str, int, str]


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def parts(source: str) -> Iterator[Part]:
    """Yield what a script consists of: its text, commands and code, in order.

    Args:
        source: The script; its docstring is left out.

    Yields:
        "text", "sh" or "python"; the first line; and the part.
    """
    line = 1
    for number, cell in enumerate(re.split(r"^# %%.*\n", source, flags=re.MULTILINE)):
        if number:
            line += 1  # that of the mark
            comment = re.match(r"(?:#.*\n|\n)*", cell)
            text = comment.group(0) if comment else ""
            said = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            for piece in re.split(r"((?:^\$ .*\n)+)", said, flags=re.MULTILINE):
                if piece.strip():
                    yield ("sh" if piece.startswith("$ ") else "text"), line, piece.strip()
            if code := cell[len(text) :].strip("\n"):
                yield "python", line + text.count("\n"), code
        line += cell.count("\n")


def run(name: str) -> tuple[dict[str, Any], list[str], list[Path]]:
    """Run a tutorial in an empty folder.

    Args:
        name: One of `NAMES`.

    Returns:
        Its variables, what each of its parts printed, and the pictures in the folder, which is left behind.
    """
    from ghostclip.cli import main as ghostclip

    if name == "images_timm":
        stand_in.timm()
    variables: dict[str, Any] = {"__name__": "__main__"}
    printed, path = [], HERE / f"{name}.py"
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    with _inside(folder):
        for kind, line, part in parts(path.read_text(encoding="utf-8")):
            with redirect_stdout(io.StringIO()) as output:
                if kind == "python":
                    exec(compile("\n" * (line - 1) + part, path, "exec"), variables)
                elif kind == "sh":
                    for command in part.splitlines():
                        ghostclip(shlex.split(command)[2:])
            printed.append(re.sub(r"[ \t]+$", "", output.getvalue(), flags=re.MULTILINE).strip("\n"))
    return variables, printed, sorted(folder.glob("*.png"))


def page(name: str, printed: Sequence[str] = ()) -> str:
    """Return the page of a tutorial.

    Args:
        name: One of `NAMES`.
        printed: What its parts printed; nothing by default.
    """
    pieces = []
    for number, (kind, _, part) in enumerate(parts((HERE / f"{name}.py").read_text(encoding="utf-8"))):
        pieces.append(part if kind == "text" else f"```{kind}\n{re.sub('^[$] ', '', part, flags=re.M)}\n```")
        if printed and printed[number]:
            pieces.append(f"```text\n{printed[number]}\n```")
    return "\n\n".join(pieces) + "\n"


def without_output(text: str) -> str:
    """Return a page without what was printed and without the line on the machine."""
    return OUTPUT.sub("", text).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, and write its pages.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m paper_repro.tutorials", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    names = parser.parse_args(arguments).names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no tutorial {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    torch.set_num_threads(1)
    for name in names:
        began = time.perf_counter()
        _, printed, pictures = run(name)
        took, about = (
            time.perf_counter() - began,
            machine_line(
                {
                    "machine": harness.describe(torch.device("cpu")),
                    "date": datetime.now(timezone.utc).date().isoformat(),
                }
            ),
        )
        script = f"[paper_repro/tutorials/{name}.py](repo:paper_repro/tutorials/{name}.py)"
        end = (
            f"\n*Run on {about.rstrip('.')}, in {took:.0f} s, by `python -m paper_repro.tutorials {name}`: {script}.*\n"
        )
        PAGES.mkdir(exist_ok=True)
        (PAGES / f"{name}.md").write_text(page(name, printed) + end, encoding="utf-8")
        for picture in pictures:
            shutil.copy(picture, PAGES / f"{name}-{picture.name}")
        sys.stdout.write(f"{PAGES / name}.md, {took:.0f} s\n")
    return 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
