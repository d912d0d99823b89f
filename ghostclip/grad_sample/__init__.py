"""The objects that `PrivacyEngine` hands back in the place of a model and a criterion, shaped like Opacus's.

They hold no hooks and compute nothing: all of that is the clipper's.
"""

from ghostclip.grad_sample.criterion import PrivateCriterion, PrivateLoss
from ghostclip.grad_sample.module import GradSampleHooks, GradSampleModule

__all__ = ["GradSampleHooks", "GradSampleModule", "PrivateCriterion", "PrivateLoss"]
