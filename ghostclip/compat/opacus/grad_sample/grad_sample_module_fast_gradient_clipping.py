"""The strategies of two backwards under Opacus's import path."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.compat.opacus.grad_sample.fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

__all__ = ["GradSampleHooksFastGradientClipping", "GradSampleModuleFastGradientClipping"]

__getattr__ = refusing(__name__)
