"""Noise sources, one object for each level of protection, handed to an optimizer.

Levels "fast" and "secure" draw continuous Gaussian noise in float64 (`continuous`); "exact" draws discrete Gaussian
noise for sums of gradients on an integer grid (`exact`).
"""

from ghostclip.noise.continuous import FastNoise, SecureNoise, make_noise_source
from ghostclip.noise.exact import ExactNoise

__all__ = ["ExactNoise", "FastNoise", "SecureNoise", "make_noise_source"]
