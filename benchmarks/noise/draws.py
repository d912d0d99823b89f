"""Who draws normal values here: the levels of noise, and torch's own generators beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ghostclip.noise import make_noise_source

Draw = Callable[[int], torch.Tensor]
"""How many values -> that many, float64 or float32, meant to be independent N(0, 1)."""

EXACT_SCALE = 2.0**24


@dataclass(frozen=True)
class Drawer:
    """One way to draw normal values.

    Attributes:
        title: Name in the table.
        start: Returns a function that draws, with fresh entropy.
        draws: Values of the count of tails, in a full run.
    """

    title: str
    start: Callable[[], Draw]
    draws: int


def _source(level: str) -> Callable[[], Draw]:
    def start() -> Draw:
        source = make_noise_source(level=level)

        def draw(count: int) -> torch.Tensor:
            values = torch.zeros(count, dtype=torch.float64)
            source.add_(values, 1.0)
            return values

        return draw

    return start


def _exact() -> Draw:
    source = make_noise_source(level="exact")

    def draw(count: int) -> torch.Tensor:
        values = torch.zeros(count, dtype=torch.int64)
        source.add_(values, EXACT_SCALE)
        return values.to(torch.float64).mul_(1 / EXACT_SCALE)

    return draw


def _torch(dtype: torch.dtype) -> Callable[[], Draw]:
    def start() -> Draw:
        generator = torch.Generator()
        generator.seed()
        return lambda count: torch.empty(count, dtype=dtype).normal_(generator=generator)

    return start


DRAWERS = (
    Drawer("fast", _source("fast"), 2**33),
    Drawer("secure, ChaCha20", _source("secure"), 2**33),
    Drawer("exact, s = 2^24", _exact, 2**30),
    Drawer("torch float32", _torch(torch.float32), 2**33),
    Drawer("torch float64", _torch(torch.float64), 2**28),
)
