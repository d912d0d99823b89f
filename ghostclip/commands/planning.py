"""Commands before a training: `inspect` a model, `plan` the devices, `plan-privacy` for a budget."""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

from ghostclip._validate import refuse_any
from ghostclip.terminal import (
    DELTA,
    FILE,
    OPTIMIZER,
    TRAINABLE,
    Options,
    Working,
    gigabytes,
    quietly,
    require_files,
    require_least,
    write_json,
    write_page,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ghostclip.mechanisms import CalibratedMechanism


EXIT_REFUSED = 3


INSPECT: Final[Options] = {
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
    **TRAINABLE,
    "--batch-axis": {"type": int, "choices": (0, 1), "default": 0,
                     "help": "where samples lie in the inputs (default: %(default)s)"},
    **OPTIMIZER,
    "--device-memory": {"type": gigabytes, "action": "append", "metavar": "GB", "help": "memory of a device to "
                        "fit on, as 24 or 24GB; may be given several times (default: the usual sizes)"},
    "--json": {**FILE, "help": "write the findings as JSON; - prints them instead of the page"},
}  # fmt: skip


def run_inspect(args: dict[str, Any]) -> int:
    """Say how a model's gradients would be clipped, what that costs and what is refused.

    examples:
      ghostclip inspect gpt2
          a small stand-in of the architecture: what is covered, what is refused
      ghostclip inspect gpt2 --full --sequence-length 512 --device-memory 24
          the same at its real sizes, from shapes alone: what a step costs, and the physical batch that fits on 24 GB
      ghostclip inspect train.py:make_model --batch-size 16
          your own model: a function that returns it

    A function in the file may make the batch: example_batch. It may take batch_size and sequence_length, and returns
    what the model is called with: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments;
    samples lie along axis 0 (--batch-axis):

      def make_model():
          return Classifier()

      def example_batch(batch_size, sequence_length):
          return {"input_ids": torch.randint(0, 1000, (batch_size, sequence_length))}

    The loss is not needed: what clipping takes depends on the model and the sizes alone.
    """
    from ghostclip.validation.inspection import DEVICES, inspect_model
    from ghostclip.validation.sources import InspectionRequest, load_source

    require_least(args, {"batch_size": 2, "sequence_length": 1})
    require_files(args)
    request = InspectionRequest(**{one.name: args[one.name] for one in fields(InspectionRequest)})
    is_factory = request.full and ":" in request.model
    refuse_any((is_factory, "--full: a factory's model has its real sizes already; leave it out"))
    with quietly("inspecting"):
        inspection = inspect_model(
            load_source(request),
            proof=load_source(replace(request, full=False)) if request.full else None,
            devices=args["device_memory"] or DEVICES,
            **{name: args[name] for name in ("strategy", "trainable", "optimizer")},
        )
    write_page(args["json"], inspection)
    return 0 if inspection.ok else EXIT_REFUSED


PLAN: Final[Options] = {
    "model": {"metavar": "MODEL", "help": "llama-1b, llama-8b, llama-70b or llama-405b at their published sizes; an "
              "architecture of transformers (gpt2, bert, vit, ...), a local Hugging Face folder, or a Python function "
              "that returns a model or (model, batch): path/to/file.py:factory, module:factory"},
    "--mesh": {"metavar": "AXES", "default": "dp=1",
               "help": "sizes of the mesh's axes replicate, dp, tp, cp and pp, as dp=8,tp=4 (default: %(default)s)"},
    "--context-length": {"type": int, "metavar": "T", "default": 1024,
                         "help": "tokens of a sample (default: %(default)s)"},
    "--device-memory": {"type": gigabytes, "metavar": "GB", "default": "80",
                        "help": "memory of a device, as 24 or 24GB (default: %(default)s)"},
    "--batch-size": {"type": int, "metavar": "B",
                     "help": "samples of a device's physical batch (default: the most that fit)"},
    "--microbatches": {"type": int, "metavar": "M",
                       "help": "parts of a batch in a pipeline (default: 4 for each stage of pp)"},
    "--checkpointing": {"action": "store_true",
                        "help": "keep the blocks' inputs alone, and run them again in a backward"},
    **OPTIMIZER,
    **TRAINABLE,
    "--dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16",
                "help": "what a step computes in (default: %(default)s)"},
    "--json": {**FILE, "help": "write the plan as JSON; - prints it instead of the page"},
}  # fmt: skip


def run_plan(args: dict[str, Any]) -> int:
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
    import torch

    from ghostclip.scaling import Mesh, load_planned, plan_devices

    require_least(args, {"context_length": 1, "batch_size": 1, "microbatches": 1})
    require_files(args)
    mesh = Mesh.parse(args["mesh"])
    with quietly("planning"):
        # Of two samples: what all of a batch have in common counts half.
        planned = load_planned(
            args["model"], batch_size=2, context_length=args["context_length"],
            dtype=getattr(torch, args["dtype"]), trainable=args["trainable"], mesh=mesh,
        )  # fmt: skip
        plan = plan_devices(
            planned, mesh=mesh, device_bytes=args["device_memory"], batch_size=args["batch_size"] or 0,
            optimizer=args["optimizer"], checkpointing=args["checkpointing"],
            microbatches=args["microbatches"] or 0,
        )  # fmt: skip
    write_page(args["json"], plan)
    return 0


_SCHEDULES: Final[dict[str, list[float] | None]] = {
    "constant": None, "linear": [1 - step / 1000 for step in range(1000)],
    "cosine": [math.cos(math.pi * step / 2000) ** 2 for step in range(1000)],
}  # fmt: skip
"""Learning rates over a training, which falls to 0 but for the first."""
PLAN_PRIVACY: Final[Options] = {
    "--samples": {"type": int, "metavar": "N", "help": "samples in the data set"},
    "--batch-size": {"type": int, "metavar": "B", "help": "samples of a batch, on average"},
    "--epochs": {"type": int, "metavar": "E", "help": "passes over the data"},
    "--target-epsilon": {"type": float, "metavar": "E", "help": "epsilon not to be exceeded"},
    **DELTA,
    "--momentum": {"type": float, "metavar": "M", "default": 0.0, "help": "of the optimizer (default: %(default)s)"},
    "--schedule": {"choices": tuple(_SCHEDULES), "default": "constant",
                   "help": "of the learning rate (default: %(default)s)"},
    "--json": {**FILE, "help": "write the result as JSON; - for standard output"},
}  # fmt: skip
_NEEDED: Final = ("samples", "batch_size", "epochs", "target_epsilon")
_LARGER: Final = (1, 4, 16)
_ADVICE: Final = """\
what to tune, and in which order:
  1. the batch size: the noise of a step over it, as above; take the largest that time allows
  2. the learning rate, at the clipping norm 1 (or clipping="automatic", which has none to tune)
  3. the clipping norm, if at all: half and twice of it, with the learning rate divided and multiplied by as much
  tune on public data of that kind, or on fewer samples at the same noise over the batch size; every run on the
  private samples costs what a training costs, unless only the best of a random number of them is looked at
"""


def run_plan_privacy(args: dict[str, Any]) -> int:
    """Compare ways to draw records and to add noise for a privacy budget, and recommend one.

    examples:
      ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3
          how much noise each of them leaves in the parameters
      ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3 --momentum 0.9
          the same for an optimizer with momentum
      ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3 --schedule cosine
          the same for a learning rate that falls to 0
    """
    from ghostclip.accounting.calibration import delta_too_large
    from ghostclip.mechanisms import plan_privacy
    from ghostclip.mechanisms.plan import described, noise_to_batch, recommendation

    require_files(args)
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if args[name] is None]
    refuse_any((bool(missing), f"{', '.join(missing)}: needed."))
    require_least(args, {"samples": 1, "batch_size": 1, "epochs": 1})
    samples, size, momentum = args["samples"], args["batch_size"], args["momentum"]
    refuse_any(
        (size > samples, f"--batch-size {size}: must be from 1 to --samples, {samples}."),
        (not 0 <= momentum < 1, f"--momentum {momentum:g}: must be at least 0 and below 1."),
    )

    def plans_at(batch_size: int) -> list[CalibratedMechanism]:
        return plan_privacy(
            num_samples=samples, batch_size=batch_size, epochs=args["epochs"], target_epsilon=args["target_epsilon"],
            target_delta=args["delta"], momentum=momentum, learning_rates=_SCHEDULES[args["schedule"]],
        )  # fmt: skip

    sizes = [size * times for times in _LARGER if size * times <= samples]
    with Working("comparing mechanisms"):
        by_size = {one: plans_at(one) for one in sizes}
    plans = by_size[size]
    too_large = delta_too_large(args["delta"], samples)
    if too_large:
        print(f"warning: {too_large}", file=sys.stderr)
    rows = [_row(plan) for plan in plans]
    batches = {
        one: {described(p.mechanism): noise_to_batch(p, num_samples=samples, batch_size=one) for p in candidates}
        for one, candidates in by_size.items()
    }
    if str(args["json"]) != "-":
        _show(plans, rows, batches, recommendation(plans))
    write_json(args["json"], {"mechanisms": rows, "noise_to_batch": batches, "recommendation": recommendation(plans)})
    return 0


def _row(plan: CalibratedMechanism) -> dict[str, Any]:
    from ghostclip.mechanisms.plan import described

    return {
        "mechanism": described(plan.mechanism), "noise_multiplier": plan.noise_multiplier, "epsilon": plan.epsilon,
        "noise_in_parameters": plan.noise, "draws": plan.draws, "buffers": plan.buffers,
        "theorem": plan.mechanism.theorem,
    }  # fmt: skip


def _show(
    plans: Sequence[CalibratedMechanism], rows: list[dict[str, Any]], batches: dict[int, dict[str, float]], take: str
) -> None:
    least = plans[0].noise
    print(f"take {take}", "", sep="\n")
    print(f"{'mechanism':34}{'sigma':>9}{'epsilon':>10}{'noise in parameters':>22}{'noise drawn':>13}{'buffers':>9}")
    for row in rows:
        noise = f"{row['noise_in_parameters']:.4g} ({row['noise_in_parameters'] / least:.2f} x)"
        cells = (
            f"{row['noise_multiplier']:>9.4g}{row['epsilon']:>10.4g}{noise:>22}{row['draws']:>11} x{row['buffers']:>9}"
        )
        print(f"{row['mechanism']:34}{cells}")
    print("  noise in parameters: root mean square over steps of SGD, learning rate 1 (at most), per clipping norm")
    print("", "noise of one step over the batch size", sep="\n")
    print(f"{'batch size':34}" + "".join(f"{size:>12}" for size in batches))
    sizes = list(batches.values())
    for name in sizes[0]:
        # Where an epoch has fewer batches than a mechanism has bands, there is no such mechanism.
        print(f"{name:34}" + "".join(f"{column[name]:>12.3g}" if name in column else f"{'-':>12}" for column in sizes))
    print("", "proved by", *(f"  {row['mechanism']}: {row['theorem']}" for row in rows), "", _ADVICE, sep="\n", end="")
