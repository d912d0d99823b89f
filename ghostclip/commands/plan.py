"""``ghostclip plan``: what a training takes of each device of a mesh, private against non-private."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from ghostclip._files import require_writable, write_text
from ghostclip.commands.inspect import gigabytes, quiet
from ghostclip.errors import InvalidOptionError
from ghostclip.terminal import Working

EXAMPLES = """\
examples:
  ghostclip plan llama-8b --mesh dp=8 --context-length 4096 --device-memory 80
      memory of a device, bytes on the wire and FLOPs; the largest physical batch that fits
  ghostclip plan llama-70b --mesh dp=8,tp=8 --context-length 4096 --device-memory 80 --checkpointing
      the same with blocks that are run again in the backward
  ghostclip plan llama-405b --mesh replicate=2,dp=64,tp=8 --context-length 4096 --device-memory 80 --checkpointing
      two copies of a model that 512 devices share
  ghostclip plan llama-8b --mesh dp=8,cp=4 --context-length 16384 --device-memory 80
      positions of each sequence on four devices each, and what private training sends more
  ghostclip plan llama-8b --mesh pp=4 --microbatches 16 --context-length 4096 --device-memory 80
      stages of a pipeline, and the factors that they keep until all have their norms
  ghostclip plan train.py:make_model --mesh dp=4 --device-memory 24
      your own model: a function that returns it, as for ghostclip inspect

Everything is counted on the meta device: no weights, no memory, no devices. Planned as torch.distributed shards it:
fully_shard over dp (copies over replicate), parallelize_module by the model's tp_plan over tp, positions over cp,
blocks over pp.
"""

_DEFAULTS: Final[dict[str, Any]] = {
    "mesh": "dp=1",
    "context_length": 1024,
    "device_memory": 80 * 10**9,
    "batch_size": 0,
    "microbatches": 0,
    "optimizer": "adamw",
    "trainable": "",
    "checkpointing": False,
    "dtype": "bfloat16",
}
# Of two samples: what all of a batch have in common counts half.
_COUNTED: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Args:
        parser: The sub-command's parser.
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="llama-1b, llama-8b, llama-70b or llama-405b at their published sizes; an architecture of transformers "
        "(gpt2, bert, vit, ...), a local Hugging Face folder, or a Python function that returns a model or "
        "(model, batch): path/to/file.py:factory, module:factory",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help="sizes of the mesh's axes replicate, dp, tp, cp and pp, as dp=8,tp=4 (default: dp=1)",
    )
    parser.add_argument("--context-length", type=int, metavar="T", help="tokens of a sample (default: 1024)")
    parser.add_argument(
        "--device-memory", type=gigabytes, metavar="GB", help="memory of a device, as 24 or 24GB (default: 80)"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help="samples of a device's physical batch (default: the most that fit)"
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="parts of a batch in a pipeline (default: 4 for each stage of pp)"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="keep the blocks' inputs alone, and run them again in a backward"
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "momentum", "sgd"),
        help="whose state is counted; momentum is SGD with it (default: adamw)",
    )
    parser.add_argument("--trainable", metavar="REGEX", help="train only parameters whose name it is found in")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="what a step computes in (default: bfloat16)")
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON; - prints it instead of the page")


def run(given: dict[str, Any]) -> int:
    """Plan a training and print a page.

    Args:
        given: The options that were given.

    Returns:
        0.

    Raises:
        InvalidOptionError: If an option is out of range.
    """
    import torch

    from ghostclip.scaling import Mesh, load_planned, plan_devices

    options = {**_DEFAULTS, **given}
    for name in ("context_length", "batch_size", "microbatches"):
        if name in given and given[name] < 1:
            raise InvalidOptionError(f"--{name.replace('_', '-')} is {given[name]}: must be at least 1")
    if options.get("json", "-") != "-":
        require_writable(Path(options["json"]), "--json")
    mesh = Mesh.parse(options["mesh"])
    with quiet(), Working("planning"):
        planned = load_planned(
            options["model"],
            batch_size=_COUNTED,
            context_length=options["context_length"],
            dtype=getattr(torch, options["dtype"]),
            trainable=options["trainable"],
            mesh=mesh,
        )
        names = ("batch_size", "optimizer", "checkpointing", "microbatches")
        found = plan_devices(
            planned, mesh=mesh, device_bytes=options["device_memory"], **{name: options[name] for name in names}
        )
    text = json.dumps(found.as_dict(), indent=1)
    if options.get("json") == "-":
        print(text)
    else:
        print(found)
        if "json" in options:
            write_text(Path(options["json"]), text + "\n")
    return 0
