"""The processes of a run, as torchrun has started them, and how they hold its model (``--mesh``).

All of them prepare the same run: rank 0 chooses the folder, draws seeds, writes and prints, and each exchanges with the
others what only it knows. What one of them refuses all of them refuse.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ghostclip._files import reason_of
from ghostclip._validate import refuse_any
from ghostclip.distributed.agreement import gathered, require_equal
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.finetune.options import FinetuneOptions, word
from ghostclip.scaling import Mesh
from ghostclip.scaling.models import blocks_of, pattern_of, require_plan


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one, unless torchrun has started several.

    Attributes:
        count: How many there are.
        rank: Number of this one.
        here: Its number among those of its machine, which is that of its GPU.
        on_machine: How many of them its machine has.
    """

    count: int = 1
    rank: int = 0
    here: int = 0
    on_machine: int = 1

    @classmethod
    def started(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Read what torchrun says to a process it starts."""
        ranks = environment.get("WORLD_SIZE", "1")
        count = int(ranks) if ranks.isdecimal() else 1
        if count <= 1:
            return cls()
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if name not in environment]
        if missing:
            raise InvalidOptionError(
                f"WORLD_SIZE={count} without {', '.join(missing)}: start the processes with torchrun "
                f"--nproc-per-node {count} -m ghostclip finetune, or unset WORLD_SIZE for one"
            )
        rank = environment["RANK"]
        here, on_machine = environment.get("LOCAL_RANK", rank), environment.get("LOCAL_WORLD_SIZE", count)
        return cls(count, int(rank), int(here), int(on_machine))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """What a run with as many processes begins with on a command line."""
        if self.count == 1:
            return "ghostclip finetune"
        machines = self.count // self.on_machine
        several = f" --nnodes {machines} ..." if machines > 1 else ""
        return f"torchrun{several} --nproc-per-node {self.on_machine} -m ghostclip finetune"

    def device(self, name: str) -> torch.device:
        """Return the device of this process, and make it the one that torch uses."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if self.count > 1 and name not in ("cpu", "cuda"):
            raise InvalidOptionError(
                f"--device {name} with {self.count} processes: each has its own; say cpu, cuda or auto"
            )
        try:
            device = torch.device(name, self.here) if self.count > 1 and name == "cuda" else torch.device(name)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InvalidOptionError(f"--device {name}: not usable on this machine ({reason_of(error)})") from error
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        return device

    def mesh(self, options: FinetuneOptions) -> Mesh:
        """Return how the model lies on the processes; options that it cannot be trained with so are refused."""
        mesh = Mesh(replicate=self.count) if options.mesh is None else Mesh.parse(options.mesh)
        refuse_any(
            (mesh.cp * mesh.pp > 1,
             f"--mesh {options.mesh}: positions (cp) and stages (pp) are divided by a model's own code. Use replicate, "
             "dp and tp here"),
            (mesh.devices != self.count,
             f"--mesh {options.mesh} is of {mesh.devices} processes, but there "
             f"{'is 1' if self.count == 1 else f'are {self.count}'}: start them with torchrun --nproc-per-node "
             f"{mesh.devices} -m ghostclip finetune, or name a mesh of {self.count}"),
            (is_in_parts(mesh) and options.physical_batch_size is None,
             f"--physical-batch-size auto with --mesh {mesh}: processes that hold the model in parts run it equally "
             "often, so that none can try sizes by itself. Give a number (ghostclip plan says what fits)"),
            (mesh.tp > 1 and options.lora is not None,
             f"--lora with --mesh {mesh}: a model's plan of tensor parallelism says nothing of adapters. Train them "
             "with dp or replicate alone; the base is frozen, and dp divides it"),
            (mesh.tp > 1 and options.vocabulary_head == "fused",
             f"--vocabulary-head fused with --mesh {mesh}: each process has some rows of the head, and tiles of logits "
             "are formed of all. Leave it out, or use dp"),
            (options.average is not None and is_in_parts(mesh),
             "--average with --mesh: averages of a model in parts are not kept; leave one out"),
        )  # fmt: skip
        return mesh


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Let the processes meet, and all but rank 0 be silent; one that raises leaves at once, and torchrun ends all."""
    if ranks.count == 1:
        yield
        return
    # Its functions have the world as a default argument: with one there already, it would never be let go.
    import torch.distributed.nn.functional
    from torch import distributed

    # What is exchanged beside sums of gradients is small, and need not wait for a GPU.
    on_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    with ExitStack() as stack:
        if not ranks.is_first:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
            # What is logged goes to the stderr of before.
            stack.callback(logging.disable, logging.NOTSET)
            logging.disable(logging.WARNING)
        yield
    distributed.destroy_process_group()


def require_same(options: FinetuneOptions) -> None:
    """Refuse processes that were given different options; called in all of them."""
    by_rank = gathered("options", options.recorded())
    for name in by_rank[0]:
        require_equal(word(name), [of_one[name] for of_one in by_rank], "Start all of them with the same options.")


def is_in_parts(mesh: Mesh) -> bool:
    """Return whether processes hold the model in parts, and so run it equally often."""
    return mesh.dp > 1 or mesh.tp > 1


def divide(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Divide a model among the processes, a block at a time; those that share samples are neighbours (tp is last)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A copy of parts is one shard (dp=1) of each.
    sharded = mesh.data_ranks > 1
    sizes = {"replicate": mesh.replicate, "dp": mesh.dp, "tp": mesh.tp}
    axes = {name: size for name, size in sizes.items() if size > 1 or (name == "dp" and sharded)}
    devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if mesh.tp > 1:
        _divide_layers(model, devices["tp"])
    if sharded:
        data = devices[tuple(name for name in axes if name != "tp")]
        for part in (*(block for _, block in blocks_of(model)), model):
            fully_shard(part, mesh=data)
    model.to(device)


def _divide_layers(model: Any, mesh: Any) -> None:
    """Divide the layers of a model as its plan says, in the styles of transformers."""
    plan = require_plan(model, mesh.size())
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise InvalidOptionError(
            "--mesh tp: this version of transformers applies a plan only while it loads weights (no "
            "transformers.distributed.tensor_parallel). Install a newer one (tried: 5.23), or use dp"
        ) from error
    # The style of each module that a plan names, each after its own parameters, a tied one by its first name alone.
    known, styles = {name for name, _ in model.named_parameters()}, {}
    for path, module in model.named_modules():
        style = plan.get(pattern_of(path))
        names = [f"{path}.{key}" for key, _ in module.named_parameters(recurse=False)]
        by_parameter = {name: plan.get(pattern_of(name), style) for name in names if name in known}
        styles.update({name: chosen for name, chosen in {**by_parameter, path: style}.items() if chosen is not None})
    try:
        apply_tensor_parallelism(model, mesh, styles)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        said = f"its plan of tensor parallelism cannot be applied ({reason_of(error)}). Leave tp out"
        raise UnsupportedModelError(f"{type(model).__name__}: {said}") from error
    # What was one parameter became one for each place.
    model.tie_weights()
