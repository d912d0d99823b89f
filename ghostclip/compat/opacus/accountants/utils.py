"""From a budget to the noise that keeps it."""

from ghostclip.accounting import get_noise_multiplier
from ghostclip.accounting.calibration import MAX_SIGMA

__all__ = ["MAX_SIGMA", "get_noise_multiplier"]
