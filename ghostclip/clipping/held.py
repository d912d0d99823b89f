"""A backward that has its own norms, and waits for those of other parts of the model."""

from typing import NamedTuple

from ghostclip.capture.forward import ForwardContext
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.passes import BookKeeping


class Held(NamedTuple):
    """One backward without clipped sums yet: its listener with the factors, its norms, and its forward."""

    listener: BookKeeping
    total: GroupNorms
    forward: ForwardContext
