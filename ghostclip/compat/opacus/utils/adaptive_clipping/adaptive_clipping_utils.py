"""Adaptive clipping under Opacus's import path: an engine that adapts its bound unless told otherwise, and losses."""

from __future__ import annotations

import dataclasses

from ghostclip.assembly.private import Private, PrivateWithCriterion, Request
from ghostclip.compat.opacus.utils.adaptive_clipping.losses import (
    DPLossFastGradientAdaptiveClipping,
    DPTensorFastGradientAdaptiveClipping,
)
from ghostclip.engine import PrivacyEngine
from ghostclip.privacy.budget import Budget

__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """`PrivacyEngine` with `clipping="adaptive"` where `clipping` is not given.

    Privacy:
        The noisy count that moves the bound is part of each step's release, in every strategy; σ is the whole step's.
    """

    def _assemble(self, request: Request, budget: Budget | None) -> Private | PrivateWithCriterion:
        clipping = request.clipping
        if clipping.clipping == "flat":
            request = dataclasses.replace(request, clipping=dataclasses.replace(clipping, clipping="adaptive"))
        return super()._assemble(request, budget)
