"""Poisson sampling under Opacus's import path."""

from ghostclip.compat.opacus.data_loader import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler

__all__ = ["DistributedUniformWithReplacementSampler", "UniformWithReplacementSampler"]
