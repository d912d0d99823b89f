"""States of a divided model and its optimizer, whole for a file that rank 0 writes, and in parts again when it is read.

A file then does not depend on how many ranks there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip._tree import tensors
from ghostclip.distributed.agreement import is_first
from ghostclip.distributed.placement import local_part, placement_of


def is_in_parts(state: Any) -> bool:
    """Return whether a nested state contains DTensors."""
    return any(map(_torch.is_sharded_tensor, tensors(state)))


@torch.no_grad()
def gathered_whole(state: Any) -> Any:
    """Return a nested state whose tensors are whole and in main memory on rank 0; called on all ranks.

    Cost:
        One all-gather a tensor; a device holds one whole tensor at a time.
    """
    # On other ranks DTensors become None.
    if isinstance(state, Mapping):
        # A model's state is a dict with attributes of its own, which only its own class reads.
        return {name: gathered_whole(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [gathered_whole(value) for value in state] if isinstance(state, list) else (*map(gathered_whole, state),)
    if not _torch.is_sharded_tensor(state):
        return state
    # Parts that are kept in main memory are gathered where the ranks meet.
    whole = state.detach().to(state.device_mesh.device_type).full_tensor()
    return whole.cpu() if is_first() else None


def parts_for(saved: Any, like: Any) -> Any:
    """Return this rank's part of a saved whole tensor, laid out as ``like``; anything else as it is."""
    fits = isinstance(saved, Tensor) and _torch.is_sharded_tensor(like) and saved.shape == like.shape
    if not fits or _torch.is_sharded_tensor(saved):
        return saved
    from torch.distributed.tensor import DTensor

    placement, held = placement_of("saved state", like), like.to_local()
    part = local_part(saved.reshape(placement.shape), placement).reshape(held.shape).to(held.device).contiguous()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
