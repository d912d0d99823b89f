"""Say how a model's gradients would be clipped, what that costs and what is refused.

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

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any, Final

from ghostclip.commands import options
from ghostclip.errors import InvalidOptionError

EXIT_REFUSED = 3


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 3,32,32") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every size must be at least 1")
    return sizes


OPTIONS: Final[options.Options] = {
    "model": {"metavar": "MODEL", "help": "an architecture of transformers (gpt2, bert, vit, ...; nothing is "
              "downloaded), a local Hugging Face folder, or a Python function that returns a model or (model, batch): "
              "path/to/file.py:factory, module:factory"},
    "--full": {"action": "store_true", "help": "plan architectures and folders at their real sizes, from shapes alone "
               "(default: a small stand-in)"},
    "--batch-size": {"type": int, "metavar": "B", "default": 4, "help": "samples in the batch (default: %(default)s)"},
    "--sequence-length": {"type": int, "metavar": "T", "default": 32,
                          "help": "tokens of a sample (default: %(default)s)"},
    "--strategy": {"choices": ("auto", "bookkeeping", "ghost", "fast", "hooks"), "default": "auto",
                   "help": "how gradients are clipped (default: %(default)s)"},
    **options.TRAINABLE,
    "--batch": {"metavar": "NAME", "default": "",
                "help": "function beside the factory that makes a batch (default: example_batch)"},
    "--input-shape": {"type": _shape, "metavar": "D,D,...", "default": (),
                      "help": "shape of one sample of a factory's model, as 3,32,32"},
    "--batch-axis": {"type": int, "choices": (0, 1), "default": 0,
                     "help": "where samples lie in the inputs (default: %(default)s)"},
    **options.OPTIMIZER,
    "--device-memory": {"type": options.gigabytes, "action": "append", "metavar": "GB", "help": "memory of a device to "
                        "fit on, as 24 or 24GB; may be given several times (default: the usual sizes)"},
    "--json": {**options.FILE, "help": "write the findings as JSON; - prints them instead of the page"},
}  # fmt: skip


def run(given: dict[str, Any]) -> int:
    """Inspect a model, print a page, and return 0, or 3 if the model is refused as it is."""
    from ghostclip.validation.inspection import DEVICES, inspect_model
    from ghostclip.validation.sources import InspectionRequest, load_source

    options.require_least(given, {"batch_size": 2, "sequence_length": 1})
    options.require_files(given)
    request = InspectionRequest(**{one.name: given[one.name] for one in fields(InspectionRequest)})
    if request.full and ":" in request.model:
        raise InvalidOptionError("--full: a factory's model has its real sizes already; leave it out")
    with options.quietly("inspecting"):
        found = inspect_model(
            load_source(request),
            proof=load_source(replace(request, full=False)) if request.full else None,
            devices=given["device_memory"] or DEVICES,
            **{name: given[name] for name in ("strategy", "trainable", "optimizer")},
        )
    options.write_page(given["json"], found)
    return 0 if found.ok else EXIT_REFUSED
