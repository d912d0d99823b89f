"""Elements of the largest temporary that a norm may allocate: fixed on a CPU, a share of what is free on a GPU."""

from __future__ import annotations

from typing import Final

import torch

ON_CPU: Final = 1 << 22
"""Elements on a CPU (float32: 16 MiB), where larger ones are slower, and the least elsewhere."""

MOST: Final = 1 << 27
"""The most elements (float32: 512 MiB): Gram matrices of all samples at once."""

# Of what is free: two temporaries at a time, and as much again for whatever else the backward allocates.
_SHARE: Final = 4

_found: dict[torch.device, int] = {}


def elements(device: torch.device) -> int:
    """Return how many elements a temporary may have."""
    # On a GPU a share of free memory, asked once between calls of `renew`.
    if device.type != "cuda":
        return ON_CPU
    if device not in _found:
        _found[device] = min(MOST, max(ON_CPU, _free_bytes(device) // torch.float32.itemsize // _SHARE))
    return _found[device]


def renew() -> None:
    """Drop the cached free memory, as another backward begins."""
    _found.clear()


def _free_bytes(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
