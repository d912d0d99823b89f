"""An engine whose clip bound follows a quantile of the norms unless it is told otherwise, under Opacus's name."""

from __future__ import annotations

import dataclasses

from ghostclip.privacy_engine import PrivacyEngine
from ghostclip.utils.assembly import Private, PrivateWithCriterion, Request
from ghostclip.utils.budget import Budget


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
