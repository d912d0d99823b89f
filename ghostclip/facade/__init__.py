"""Facades that `PrivacyEngine` hands back in the place of a model and a criterion.

The objects hold no hooks and compute nothing: all of that is the clipper's.
"""

from ghostclip.facade.criterion import KnownCriterion, PrivateCriterion, PrivateLoss
from ghostclip.facade.module import MODES, GradSampleHooks, GradSampleModule, strategy_of

__all__ = [
    "MODES",
    "GradSampleHooks",
    "GradSampleModule",
    "KnownCriterion",
    "PrivateCriterion",
    "PrivateLoss",
    "strategy_of",
]
