"""Adaptive clipping in two passes, under Opacus's import path.

The bound is adapted by the private optimizer in every strategy, from a count that is part of the step's release;
criteria and losses only say how.
"""

from ghostclip.compat.opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from ghostclip.compat.opacus.utils.adaptive_clipping.losses import (
    DPLossFastGradientAdaptiveClipping,
    DPTensorFastGradientAdaptiveClipping,
)

__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]
