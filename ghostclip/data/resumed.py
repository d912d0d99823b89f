"""Start of a pass over a loader, also in the middle of an epoch that another process began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def started(start: Callable[[], Iterator[Any]], *, resuming: bool) -> Iterator[Any]:
    """Begin a pass; one that continues an interrupted epoch leaves torch's global generator as it is."""
    # torch draws a seed for workers from that generator whenever a pass starts. The interrupted run drew it before it
    # was saved, so that drawing it again would change every dropout mask that follows.
    if not resuming:
        return start()
    state = torch.get_rng_state()
    try:
        return start()
    finally:
        torch.set_rng_state(state)
