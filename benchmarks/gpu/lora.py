"""LoRA on a Llama of 1.5 billion frozen weights in bfloat16, as most fine-tune: ordinary and private training.

Adapters of rank 16 in float32 beside every linear layer of the blocks, B 8, T 512. With `--quantised` frozen weights
are held in 4 bits (QLoRA), where bitsandbytes is installed. Each way runs in a process of its own.

Shape suffixes: B samples, T positions, I features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import NON_PRIVATE, CannotDo
from benchmarks.gpu.large import _engine, _made_on, _timed
from benchmarks.gpu.models import Large, large_model
from benchmarks.gpu.rows import started
from benchmarks.memory import load_what_a_step_loads
from benchmarks.tasks import Task, token_batch
from ghostclip.kernels import runtime

RANK = 16
SCALE = 2.0
SAMPLES, LENGTH = 8, 512
VOCABULARY = 128_256


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two small ones beside it, in float32."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = RANK) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(inputs, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, outputs, bias=False, dtype=torch.float32)
        # Not zero, as it is no longer after the first step.
        nn.init.normal_(self.lora_B.weight, std=0.01)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the last axis."""
        beside = self.lora_B(self.lora_A(x_BTI.float()))
        return self.base(x_BTI) + (SCALE * beside).to(x_BTI.dtype)


def adapted(make: Callable[[], nn.Module], *, quantised: bool) -> nn.Module:
    """Make a model whose weights are frozen, with adapters beside the linear layers of its blocks."""
    model = make().requires_grad_(requires_grad=False)
    for name, layer in list(model.get_submodule("blocks").named_modules()):
        if isinstance(layer, nn.Linear):
            place, _, own = name.rpartition(".")
            base = _in_4_bits(layer) if quantised else layer
            beside = Adapted(base, layer.in_features, layer.out_features).to(layer.weight.device)
            setattr(model.get_submodule(f"blocks.{place}"), own, beside)
    return model


def _in_4_bits(layer: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype)
    made.weight = bnb.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
    quantised: nn.Module = made.to(layer.weight.device)
    return quantised


def fine_tuning(case: Large, *, quick: bool, quantised: bool) -> Task:
    """Return the fine-tuning of a model."""
    if quick:
        task = case.quick
    else:
        batch = token_batch(VOCABULARY, LENGTH)
        task = replace(case.task, title=f"{case.task.title.partition(',')[0]}, bf16, T {LENGTH}", make_batch=batch)
        task = replace(task, batch_size=SAMPLES)
    what = "QLoRA" if quantised else "LoRA"
    make = partial(adapted, task.make_model, quantised=quantised)
    return replace(task, title=f"{task.title}: {what} of rank {RANK} in float32", make_model=make)


def main(given: list[str] | None = None) -> int:
    """Measure one way."""
    own: list[tuple[str, dict[str, Any]]] = [
        ("--engine", {"default": NON_PRIVATE.name}),
        ("--kernels", {"choices": runtime.MODES, "default": "off"}),
        ("--quantised", {"action": "store_true", "help": "hold the frozen weights in 4 bits"}),
    ]
    job = started("benchmarks.gpu.lora", __doc__, *own, given=given)
    chosen, case = job.arguments, large_model("llama-1b")
    task = fine_tuning(case, quick=job.quick, quantised=chosen.quantised)
    name = f"{task.title}: {chosen.engine}, kernels {chosen.kernels}"
    with job.case(name) as row, runtime.using(chosen.kernels):
        row |= {"engine": chosen.engine, "kernels": chosen.kernels}
        if chosen.quantised and not find_spec("bitsandbytes"):
            raise CannotDo("bitsandbytes is not installed")
        engine = _engine(chosen.engine)
        small = replace(case.quick, make_model=partial(adapted, case.quick.make_model, quantised=chosen.quantised))
        load_what_a_step_loads(engine, small, job.device)
        task = replace(task, make_model=partial(_made_on, job.device, task.make_model))
        row.update(_timed(engine, task, job.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
