"""Losses of logits whose classes lie on several ranks, as each rank finds them: batches of as many sizes as matter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from ghostclip import GhostClipper
from ghostclip.distributed import ShardedModel
from ghostclip.errors import SampleMixingError
from ghostclip.losses import token_losses

CLASSES = 10
BATCHES = (2, 3, 5, 10, 20)
"""Classes are as many as samples, or a multiple of them, or neither."""


def find(rank: int, ranks: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.
        ranks: How many there are.

    Returns:
        By what it is of, for each size of a batch.
    """
    del rank
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    return {
        "norms": {size: norms(size, mesh) for size in BATCHES},
        "mixed": {size: _is_taken(size, mesh) for size in BATCHES},
    }


def norms(size: int, mesh: Any = None, *, mixed: bool = False) -> Tensor:
    """Norms of the samples of a batch, which is proved.

    Args:
        size: How many samples.
        mesh: Of the ranks; None for one process.
        mixed: Whether logits follow those of other samples, by a factor that is zero now.

    Returns:
        Of each sample in each group.
    """
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, CLASSES)).double()
    x, labels = torch.randn(size, 3, 4).double(), torch.randint(CLASSES, (size, 3))
    if mesh is not None:
        parallelize_module(net, mesh, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    sharded = None if mesh is None else ShardedModel(net)
    clipper = GhostClipper(net, sharded=sharded, max_grad_norm=1.0)
    with nullcontext() if mesh is None else loss_parallel():
        logits = net(x)
        clipper.backward(token_losses(logits - 0.0 * logits.mean(0) if mixed else logits, labels))
    return clipper.group_norms


def _is_taken(size: int, mesh: Any) -> bool:
    try:
        norms(size, mesh, mixed=True)
    except SampleMixingError:
        return False
    return True
