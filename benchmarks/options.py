"""Options that several programs share, refused in one line where they are wrong."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def device(text: str) -> torch.device:
    """A device that is there, for `type=` of an option."""
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: say cpu, cuda or cuda:1") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"torch sees {torch.cuda.device_count()} CUDA devices, so there is no {text}")
    return found


def positive(text: str) -> float:
    """A number above zero, for `type=` of an option."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above zero")
    return value


def count(text: str) -> int:
    """A whole number above zero, for `type=` of an option."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)


def folder(text: str) -> Path:
    """A folder that files can be written to, made here, so that no run ends without a place for what it measured."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"cannot make the folder {text}: {problem.strerror}") from None
    return path


def refuse_unknown(
    parser: argparse.ArgumentParser, option: str, given: Sequence[str] | None, known: Sequence[str]
) -> None:
    """End the program with one line if a name is not known."""
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        parser.error(f"argument {option}: unknown: {', '.join(unknown)} (there are: {', '.join(known)})")
