"""Say what a training takes of each of many devices, private against non-private.

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

from __future__ import annotations

from typing import Any, Final

from ghostclip.commands import options

OPTIONS: Final[options.Options] = {
    "model": {"metavar": "MODEL", "help": "llama-1b, llama-8b, llama-70b or llama-405b at their published sizes; an "
              "architecture of transformers (gpt2, bert, vit, ...), a local Hugging Face folder, or a Python function "
              "that returns a model or (model, batch): path/to/file.py:factory, module:factory"},
    "--mesh": {"metavar": "AXES", "default": "dp=1",
               "help": "sizes of the mesh's axes replicate, dp, tp, cp and pp, as dp=8,tp=4 (default: %(default)s)"},
    "--context-length": {"type": int, "metavar": "T", "default": 1024,
                         "help": "tokens of a sample (default: %(default)s)"},
    "--device-memory": {"type": options.gigabytes, "metavar": "GB", "default": "80",
                        "help": "memory of a device, as 24 or 24GB (default: %(default)s)"},
    "--batch-size": {"type": int, "metavar": "B",
                     "help": "samples of a device's physical batch (default: the most that fit)"},
    "--microbatches": {"type": int, "metavar": "M",
                       "help": "parts of a batch in a pipeline (default: 4 for each stage of pp)"},
    "--checkpointing": {"action": "store_true",
                        "help": "keep the blocks' inputs alone, and run them again in a backward"},
    **options.OPTIMIZER,
    **options.TRAINABLE,
    "--dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16",
                "help": "what a step computes in (default: %(default)s)"},
    "--json": {**options.FILE, "help": "write the plan as JSON; - prints it instead of the page"},
}  # fmt: skip


def run(given: dict[str, Any]) -> int:
    """Plan a training, print a page, and return 0."""
    import torch

    from ghostclip.scaling import Mesh, load_planned, plan_devices

    options.require_least(given, {"context_length": 1, "batch_size": 1, "microbatches": 1})
    options.require_files(given)
    mesh = Mesh.parse(given["mesh"])
    with options.quietly("planning"):
        # Of two samples: what all of a batch have in common counts half.
        planned = load_planned(
            given["model"], batch_size=2, context_length=given["context_length"],
            dtype=getattr(torch, given["dtype"]), trainable=given["trainable"], mesh=mesh,
        )  # fmt: skip
        found = plan_devices(
            planned, mesh=mesh, device_bytes=given["device_memory"], batch_size=given["batch_size"] or 0,
            optimizer=given["optimizer"], checkpointing=given["checkpointing"],
            microbatches=given["microbatches"] or 0,
        )  # fmt: skip
    options.write_page(given["json"], found)
    return 0
