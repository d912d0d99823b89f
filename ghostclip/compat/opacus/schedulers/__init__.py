"""Schedules of the noise multiplier and of the clip bound, under Opacus's names.

They change the one place that holds the value (the optimizer's σ, the clip policy's C), so noise, clipping and account
always see the same. Every step is accounted with the σ that it was made with.
"""

from ghostclip.optim.schedules import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)

__all__ = [
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "StepGradClip",
    "StepNoise",
]
