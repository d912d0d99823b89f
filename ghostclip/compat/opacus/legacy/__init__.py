"""The interface of Opacus's first generation (0.x): an engine that is attached to an optimizer, and norm clippers.

New code uses `ghostclip.PrivacyEngine`, which also sees to the sampling.
"""

from ghostclip.compat.opacus.legacy.engine import PrivacyEngine
from ghostclip.compat.opacus.legacy.models import DPModelInspector, convert_batchnorm_modules
from ghostclip.compat.opacus.legacy.per_sample_gradient_clip import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    PerSampleGradientClipper,
)

__all__ = [
    "ConstantFlatClipper",
    "ConstantPerLayerClipper",
    "DPModelInspector",
    "NormClipper",
    "PerSampleGradientClipper",
    "PrivacyEngine",
    "convert_batchnorm_modules",
]
