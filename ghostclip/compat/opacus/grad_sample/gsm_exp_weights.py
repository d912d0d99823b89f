"""The facade under the name of another way to form per-sample gradients, which are the same."""

from ghostclip.facade.module import GradSampleModule as GradSampleModuleExpandedWeights

__all__ = ["GradSampleModuleExpandedWeights"]
