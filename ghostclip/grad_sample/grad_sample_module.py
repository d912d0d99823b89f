"""The facades under Opacus's import path."""

from ghostclip.grad_sample.module import GradSampleHooks, GradSampleModule

__all__ = ["GradSampleHooks", "GradSampleModule"]
