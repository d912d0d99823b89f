"""Poisson sampling under Opacus's import path."""

from ghostclip.data_loader.opacus_names import DistributedUniformWithReplacementSampler
from ghostclip.sampling import UniformWithReplacementSampler

__all__ = ["DistributedUniformWithReplacementSampler", "UniformWithReplacementSampler"]
