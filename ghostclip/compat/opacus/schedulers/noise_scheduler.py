"""Schedules of the noise under Opacus's import path."""

from ghostclip.optim.schedules import ExponentialNoise, LambdaNoise, StepNoise

__all__ = ["ExponentialNoise", "LambdaNoise", "StepNoise"]
