"""The facades under the names that Opacus gives to what they derive from."""

from ghostclip.grad_sample.module import GradSampleHooks as AbstractGradSampleHooks
from ghostclip.grad_sample.module import GradSampleModule as AbstractGradSampleModule

__all__ = ["AbstractGradSampleHooks", "AbstractGradSampleModule"]
