"""Noise sources, one object for each level of protection, handed to an optimizer.

Levels "fast" and "secure" draw continuous Gaussian noise in float64 (`continuous`); "exact" draws discrete Gaussian
noise (`discrete`, `exact`) for sums of gradients on an integer grid (`grid`, `sums`, `exact_release`).
"""

from ghostclip.noise.continuous import LEVELS, FastNoise, SecureNoise, make_noise_source
from ghostclip.noise.discrete import discrete_gaussian
from ghostclip.noise.exact import ExactNoise
from ghostclip.noise.exact_release import ExactRelease
from ghostclip.noise.gaussian import box_muller
from ghostclip.noise.grid import Grid
from ghostclip.noise.keyed import NoiseSource
from ghostclip.noise.keys import RandomKey, WordStream
from ghostclip.noise.packs import add_noise_
from ghostclip.noise.sums import ExactSums

__all__ = [
    "LEVELS",
    "ExactNoise",
    "ExactRelease",
    "ExactSums",
    "FastNoise",
    "Grid",
    "NoiseSource",
    "RandomKey",
    "SecureNoise",
    "WordStream",
    "add_noise_",
    "box_muller",
    "discrete_gaussian",
    "make_noise_source",
]
