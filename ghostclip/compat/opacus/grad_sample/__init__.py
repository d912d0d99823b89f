"""The objects that `PrivacyEngine` hands back in the place of a model and a criterion, shaped like Opacus's.

They hold no hooks and compute nothing: all of that is the clipper's. Samplers for layers that cannot be captured are
registered here under Opacus's names.
"""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.compat.opacus.grad_sample.fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from ghostclip.compat.opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from ghostclip.compat.opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from ghostclip.compat.opacus.grad_sample.utils import get_gsm_class, get_hooks_class, prepare_module, wrap_model
from ghostclip.facade.criterion import PrivateCriterion, PrivateLoss
from ghostclip.facade.modes import MODES, strategy_of
from ghostclip.facade.module import GradSampleHooks, GradSampleModule
from ghostclip.rules.modules import register_grad_sampler, register_norm_sampler

__all__ = [
    "MODES",
    "AbstractGradSampleHooks",
    "AbstractGradSampleModule",
    "GradSampleHooks",
    "GradSampleHooksFastGradientClipping",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "PrivateCriterion",
    "PrivateLoss",
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "strategy_of",
    "wrap_model",
]

__getattr__ = refusing(__name__)
