"""The facades under Opacus's import path."""

from ghostclip._refused import refusing
from ghostclip.grad_sample.module import GradSampleHooks, GradSampleModule

__all__ = ["GradSampleHooks", "GradSampleModule"]

__getattr__ = refusing(__name__)
