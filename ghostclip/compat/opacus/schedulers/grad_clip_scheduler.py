"""Schedules of the clip bound under Opacus's import path."""

from ghostclip.optim.schedules import ExponentialGradClip, LambdaGradClip, StepGradClip

__all__ = ["ExponentialGradClip", "LambdaGradClip", "StepGradClip"]
