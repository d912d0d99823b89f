"""The facades under the names that Opacus gives to what they derive from."""

from ghostclip._refused import refusing
from ghostclip.grad_sample.module import GradSampleHooks as AbstractGradSampleHooks
from ghostclip.grad_sample.module import GradSampleModule as AbstractGradSampleModule

__all__ = ["AbstractGradSampleHooks", "AbstractGradSampleModule"]

__getattr__ = refusing(__name__)
