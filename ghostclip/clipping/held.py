"""A backward that has its own norms, and waits for those of other parts of the model."""

from typing import NamedTuple

from ghostclip.capture.forward import ForwardContext
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.passes import BookKeeping


class Held(NamedTuple):
    """One backward whose clipped sums have not been formed.

    Attributes:
        listener: Keeps the factors.
        total: Norms over the parameters of this part.
        forward: The forward that it went through.
    """

    listener: BookKeeping
    total: GroupNorms
    forward: ForwardContext
