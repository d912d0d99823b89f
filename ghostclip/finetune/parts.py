"""How the processes of a run hold its model: parts of each layer by its own plan (tp), shards of its blocks (dp)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ghostclip import _torch
from ghostclip.errors import InvalidOptionError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ghostclip.finetune.options import FinetuneOptions
    from ghostclip.scaling import Mesh


def is_in_parts(mesh: Mesh) -> bool:
    """Return whether processes hold the model in parts, and so run it equally often.

    Args:
        mesh: The processes.

    Returns:
        False where each has a copy.
    """
    return mesh.dp > 1 or mesh.tp > 1


def require_options(mesh: Mesh, options: FinetuneOptions) -> None:
    """Refuse options that a model in parts cannot be trained with.

    Args:
        mesh: The processes.
        options: The run's options.

    Raises:
        InvalidOptionError: One of them.
    """
    if is_in_parts(mesh) and options.physical_batch_size is None:
        raise InvalidOptionError(
            f"--physical-batch-size auto with --mesh {mesh}: processes that hold the model in parts run it equally "
            "often, so that none can try sizes by itself. Give a number (ghostclip plan says what fits)"
        )
    if mesh.tp == 1:
        return
    if options.lora is not None:
        raise InvalidOptionError(
            f"--lora with --mesh {mesh}: a model's plan of tensor parallelism says nothing of adapters. Train them "
            "with dp or replicate alone; the base is frozen, and dp divides it"
        )
    if options.vocabulary_head == "fused":
        raise InvalidOptionError(
            f"--vocabulary-head fused with --mesh {mesh}: each process has some rows of the head, and tiles of logits "
            "are formed of all. Leave it out, or use dp"
        )


def divide(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Divide a model among the processes, and move it to their devices.

    Processes that share samples are neighbours: tp is the last axis. At most a block at a time lies whole on a device.

    Args:
        model: The model, whole and equal on all of them.
        mesh: The processes.
        device: This one's.

    Raises:
        UnsupportedModelError: tp is asked for, and the model cannot be divided by a plan of its own.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ghostclip.scaling.local import blocks_of

    # A copy of parts is one shard (dp=1) of each.
    sharded = mesh.dp > 1 or mesh.replicate > 1
    sizes = {"replicate": mesh.replicate if sharded else 1, "dp": mesh.dp if sharded else 1, "tp": mesh.tp}
    axes = {name: size for name, size in sizes.items() if size > 1 or (name == "dp" and sharded)}
    devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if mesh.tp > 1:
        _divide_layers(model, devices["tp"])
    if sharded:
        data = devices[tuple(name for name in axes if name != "tp")]
        for _, block in blocks_of(model):
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    model.to(device)


def _divide_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers of a model as its plan says, in the styles of transformers."""
    from ghostclip.scaling.local import require_plan

    plan = require_plan(model, mesh.size())
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise InvalidOptionError(
            "--mesh tp: this version of transformers applies a plan only while it loads weights (no "
            "transformers.distributed.tensor_parallel). Install a newer one (tried: 5.23), or use dp"
        ) from error
    try:
        apply_tensor_parallelism(model, mesh, _of_modules(model, plan))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedModelError(
            f"{type(model).__name__}: its plan of tensor parallelism cannot be applied ({reason}). Leave tp out"
        ) from error
    # What was one parameter became one for each place.
    model.tie_weights()


def _of_modules(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Return the style of each module that a plan names, each after its own parameters."""
    # A tied parameter by its first name alone.
    known = {name for name, _ in model.named_parameters()}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        style = plan.get(_pattern(path))
        for name in (f"{path}.{key}" for key, _ in module.named_parameters(recurse=False)):
            own = plan.get(_pattern(name), style)
            if own is not None and name in known:
                found[name] = own
        if style is not None:
            found[path] = style
    return found


def _pattern(path: str) -> str:
    """Return a path as plans write it, with ``*`` for the numbers of blocks."""
    return re.sub(r"\d+", "*", path)


def shares_samples(model: nn.Module) -> bool:
    """Return whether a forward of a model is one that all processes run, or none.

    Args:
        model: The model.

    Returns:
        True where they hold it in parts.
    """
    return any(map(_torch.is_sharded_tensor, model.parameters()))
