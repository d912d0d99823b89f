"""The objects that `PrivacyEngine` hands back in the place of a model and a criterion, shaped like Opacus's.

They hold no hooks and compute nothing: all of that is the clipper's. Samplers for layers that cannot be captured are
registered here under Opacus's names.
"""

from ghostclip.grad_sample.criterion import PrivateCriterion, PrivateLoss
from ghostclip.grad_sample.module import GradSampleHooks, GradSampleModule
from ghostclip.rules.modules import register_grad_sampler, register_norm_sampler

__all__ = [
    "GradSampleHooks",
    "GradSampleModule",
    "PrivateCriterion",
    "PrivateLoss",
    "register_grad_sampler",
    "register_norm_sampler",
]
