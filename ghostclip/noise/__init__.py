"""Noise sources, one object for each level of protection, handed to an optimizer.

Levels "fast" and "secure" draw continuous Gaussian noise in float64 (`continuous`); "exact" draws discrete Gaussian
noise for sums of gradients on an integer grid (`exact`).
"""

from ghostclip.noise.continuous import LEVELS, FastNoise, SecureNoise, make_noise_source
from ghostclip.noise.exact import ExactNoise, ExactRelease, Grid, discrete_gaussian
from ghostclip.noise.keyed import NoiseSource, add_noise_
from ghostclip.noise.keys import RandomKey

__all__ = [
    "LEVELS",
    "ExactNoise",
    "ExactRelease",
    "FastNoise",
    "Grid",
    "NoiseSource",
    "RandomKey",
    "SecureNoise",
    "add_noise_",
    "discrete_gaussian",
    "make_noise_source",
]
