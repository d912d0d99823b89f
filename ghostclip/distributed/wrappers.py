"""Modules of torch that spread a model over ranks: copies are taken out of their wrapper, shards are refused."""

from __future__ import annotations

import logging
import sys

from torch import nn

from ghostclip.errors import UnsupportedModelError

_log = logging.getLogger(__name__)


def copy_inside(module: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, which adds up no gradients from then on."""
    # Clipped sums meet in the private optimizer's step; the wrapper may still be called.
    while isinstance(module, nn.parallel.DistributedDataParallel):
        _log.info("DistributedDataParallel is set aside: the private optimizer adds up the ranks' clipped sums.")
        # As in its no_sync(): otherwise it would wait for gradients that autograd never makes.
        module.require_backward_grad_sync = False
        module = module.module
    return module


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a model that is sharded in a way that hides which layer a value belongs to."""
    # DTensors are `ShardedModel`'s.
    kind = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    for path, part in module.named_modules():
        if kind is not None and isinstance(part, (kind,)):
            raise UnsupportedModelError(
                f"{path or 'module'} (FullyShardedDataParallel): its flat parameters hide which layer a value is of. "
                "Use torch.distributed.fsdp.fully_shard, which took its place."
            )


def _loaded(module: str, name: str) -> type | None:
    """Return a class if its module was loaded already: nothing can be an instance of it otherwise."""
    found: type | None = getattr(sys.modules.get(module), name, None)
    return found
