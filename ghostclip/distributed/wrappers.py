"""Modules of torch that spread a model over ranks: copies are taken out of their wrapper, shards are refused."""

from __future__ import annotations

import logging
import sys

from torch import nn

from ghostclip.errors import UnsupportedModelError

_log = logging.getLogger(__name__)
_SHARDED_MODULES = ("FullyShardedDataParallel", "FSDPModule")


def copy_inside(module: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, which adds up no gradients from then on.

    Clipped sums meet in the private optimizer's step. The wrapper may be called further on and does nothing of its own.

    Args:
        module: The model, or its wrapper.

    Returns:
        The model.
    """
    while isinstance(module, nn.parallel.DistributedDataParallel):
        _log.info("DistributedDataParallel is set aside: the private optimizer adds up the ranks' clipped sums.")
        # As in its no_sync(): otherwise it would wait for gradients that autograd never makes.
        module.require_backward_grad_sync = False
        module = module.module
    return module


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a model of which each rank holds a part only.

    Args:
        module: The model.

    Raises:
        UnsupportedModelError: If modules or parameters are sharded.
    """
    kinds = tuple(kind for name in _SHARDED_MODULES if (kind := _loaded("torch.distributed.fsdp", name)) is not None)
    for path, part in module.named_modules():
        if isinstance(part, kinds):
            raise UnsupportedModelError(_sharded(f"{path or 'module'} ({type(part).__name__})"))
    dtensor = _loaded("torch.distributed.tensor", "DTensor")
    for name, parameter in module.named_parameters():
        if dtensor is not None and isinstance(parameter, (dtensor,)):
            raise UnsupportedModelError(_sharded(f"parameter '{name}' (DTensor)"))


def _sharded(place: str) -> str:
    return (
        f"{place} is sharded over ranks (fully_shard, FullyShardedDataParallel, tensor parallelism): a sample's norm "
        "would be known in parts. Give make_private the whole model on every rank, built without sharding; the ranks "
        "then share each batch. What does not fit needs activation checkpointing, BatchMemoryManager, or LoRA."
    )


def _loaded(module: str, name: str) -> type | None:
    """Return a class if its module was loaded already: nothing can be an instance of it otherwise."""
    found: type | None = getattr(sys.modules.get(module), name, None)
    return found
