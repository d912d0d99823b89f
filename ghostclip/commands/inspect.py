"""``ghostclip inspect``: who is covered, how, at what price, and what is refused, before anything is trained."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ghostclip._files import require_writable, write_text
from ghostclip.errors import InvalidOptionError
from ghostclip.terminal import Working

EXIT_REFUSED = 3
EXAMPLES = """\
examples:
  ghostclip inspect gpt2
      a small stand-in of the architecture: what is covered, what is refused
  ghostclip inspect gpt2 --full --sequence-length 512 --device-memory 24
      the same at its real sizes, from shapes alone: what a step costs, and the physical batch that fits on 24 GB
  ghostclip inspect train.py:make_model --batch-size 16
      your own model: a function that returns it

A function in the file may make the batch: example_batch, or the one that --batch names. It may take batch_size and
sequence_length, and returns what the model is called with: a tensor, a tuple or list of positional arguments, or a
dict of keyword arguments; samples lie along axis 0 (--batch-axis):

  def make_model():
      return Classifier()

  def example_batch(batch_size, sequence_length):
      return {"input_ids": torch.randint(0, 1000, (batch_size, sequence_length))}

The loss is not needed: what clipping takes depends on the model and the sizes alone.
"""

_DEFAULTS: dict[str, Any] = {
    "batch_size": 4,
    "sequence_length": 32,
    "strategy": "auto",
    "trainable": "",
    "full": False,
    "batch": "",
    "input_shape": (),
    "batch_axis": 0,
    "optimizer": "adamw",
    "device_memory": (),
}
_OPTIMIZERS = ("adamw", "momentum", "sgd")
_STRATEGIES = ("auto", "bookkeeping", "ghost", "fast", "hooks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Args:
        parser: The sub-command's parser.
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an architecture of transformers (gpt2, bert, vit, ...; nothing is downloaded), a local Hugging Face "
        "folder, or a Python function that returns a model or (model, batch): path/to/file.py:factory, module:factory",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="plan architectures and folders at their real sizes, from shapes alone (default: a small stand-in)",
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="samples in the batch (default: 4)")
    parser.add_argument("--sequence-length", type=int, metavar="T", help="tokens of a sample (default: 32)")
    parser.add_argument("--strategy", choices=_STRATEGIES, help="how gradients are clipped (default: auto)")
    parser.add_argument("--trainable", metavar="REGEX", help="train only parameters whose name it is found in")
    parser.add_argument(
        "--batch", metavar="NAME", help="function beside the factory that makes a batch (default: example_batch)"
    )
    parser.add_argument(
        "--input-shape", type=_shape, metavar="D,D,...", help="shape of one sample of a factory's model, as 3,32,32"
    )
    parser.add_argument("--batch-axis", type=int, choices=(0, 1), help="where samples lie in the inputs (default: 0)")
    parser.add_argument(
        "--optimizer", choices=_OPTIMIZERS, help="whose state is counted; momentum is SGD with it (default: adamw)"
    )
    parser.add_argument(
        "--device-memory",
        type=gigabytes,
        action="append",
        metavar="GB",
        help="memory of a device to fit on, as 24 or 24GB; may be given several times (default: the usual sizes)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the findings as JSON; - prints them instead of the page")


def run(given: dict[str, Any]) -> int:
    """Inspect a model and print a page.

    Args:
        given: The options that were given.

    Returns:
        0, or 3 if the model is refused as it is.

    Raises:
        InvalidOptionError: If an option is out of range.
    """
    from ghostclip.validation.inspection import inspect_model, load_source
    from ghostclip.validation.inspection.memory import DEVICES
    from ghostclip.validation.inspection.sources import InspectionRequest

    options = {**_DEFAULTS, **given}
    for name, least in (("batch_size", 2), ("sequence_length", 1)):
        if options[name] < least:
            raise InvalidOptionError(f"--{name.replace('_', '-')} is {options[name]}: must be at least {least}")
    if options.get("json", "-") != "-":
        require_writable(Path(options["json"]), "--json")
    names = ("model", "batch_size", "sequence_length", "full", "batch", "input_shape", "batch_axis")
    request = InspectionRequest(**{name: options[name] for name in names})
    if request.full and ":" in request.model:
        raise InvalidOptionError("--full: a factory's model has its real sizes already; leave it out")
    with quiet(), Working("inspecting"):
        source = load_source(request)
        proof = load_source(InspectionRequest(**{**vars(request), "full": False})) if request.full else None
        found = inspect_model(
            source,
            strategy=options["strategy"],
            trainable=options["trainable"],
            proof=proof,
            optimizer=options["optimizer"],
            devices=options["device_memory"] or DEVICES,
        )
    text = json.dumps(found.as_dict(), indent=1)
    if options.get("json") == "-":
        print(text)
    else:
        print(found)
        if "json" in options:
            write_text(Path(options["json"]), text + "\n")
    return 0 if found.ok else EXIT_REFUSED


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the log still: the page says what is slow.

    Yields:
        Nothing.
    """
    logger = logging.getLogger("ghostclip.capture")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def gigabytes(text: str) -> int:
    """Read a size of memory.

    Args:
        text: As ``"24"`` or ``"24GB"``.

    Returns:
        Bytes.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        size = float(text.upper().removesuffix("B").removesuffix("G"))
    except ValueError:
        size = 0.0
    if not 0 < size < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory in GB, such as 24 or 24GB")
    return int(size * 10**9)


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 3,32,32") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every size must be at least 1")
    return sizes
